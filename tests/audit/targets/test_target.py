"""What is claimed of a release and what follows from it; what can be said of any target."""

import dataclasses

import pytest
import torch

from spectral_dp import Relation, accounting, audit
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import Block, Kind

CLAIM = audit.Claim(1.3, 0.7, 8, sample_rate=0.1, steps=40, delta=1e-5)


class TestClaim:
    def test_noise_is_in_units_of_the_sensitivity(self):
        """Replacing a record moves the sum by two bounds: the same multiplier means twice the noise."""
        replacing = dataclasses.replace(CLAIM, relation="replace_one")
        assert (CLAIM.moves, CLAIM.noise_std) == (1, pytest.approx(1.3 * 0.7))
        assert replacing.relation is Relation.REPLACE_ONE
        assert (replacing.moves, replacing.noise_std) == (2, pytest.approx(2 * 1.3 * 0.7))

    def test_epsilon_is_that_of_the_accountant(self):
        assert CLAIM.epsilon == accounting.epsilon(1.3, 0.1, 40, 1e-5)
        assert CLAIM.step_epsilon == accounting.gaussian_epsilon(1.3, 1e-5)
        assert CLAIM.step_epsilon > accounting.epsilon(1.3, 0.1, 1, 1e-5), "of those who are in the batch for certain"

    @pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "expected_batch_size"])
    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
    def test_what_cannot_be_audited_is_refused(self, name, value):
        with pytest.raises(ValueError, match=f"{name} must be positive"):
            dataclasses.replace(CLAIM, **{name: value})


def test_a_record_of_a_block_has_its_direction_and_length():
    basis = torch.linalg.qr(torch.randn(6, 3).double()).Q.T
    block = Block("layer", "row", basis, ("a", "b", "c"), (Kind.INTERIOR,) * 3, torch.arange(6), lambda signal: signal)
    signal = block.record(torch.tensor([3.0, 0, 4.0]), 10.0)
    torch.testing.assert_close(signal, 6 * basis[0] + 8 * basis[2])


class Sums(audit.FunctionTarget):
    """Releases the plain sum, and whatever else it is told to add."""

    def __init__(self, add=lambda: 0.0):
        super().__init__(lambda g: g.sum(0) + add(), CLAIM, dimension=4, returns="sum")


def test_noise_that_obeys_a_script_is_under_control():
    assert Sums(lambda: torch.randn(4)).controls_noise
    numbers = iter(range(10))
    assert not Sums(lambda: next(numbers)).controls_noise


def test_sizes_are_those_of_the_release():
    target = Sums()
    target.outputs = [audit.targets.target.Output("a", (2, 3), 1.0), audit.targets.target.Output("b", (), None)]
    assert [output.size for output in target.outputs] == [6, 1]
    assert target.size == 7
    assert Sums().release([torch.ones(4)], Script()).shape == (Sums().size,)
