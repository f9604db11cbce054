"""The law of the summed noise, through real processes; and mistakes with the shares, which the law rejects."""

import math
from fractions import Fraction

import pytest
import torch
from tests.support.privacy_checks import noise_law_p_values

from spectral_dp.mechanism.clipping import Clipped
from spectral_dp.mechanism.noise import NoiseSource, SecureNoise, SeededNoise
from spectral_dp.relations import Relation
from spectral_dp.training.distributed import shares
from spectral_dp.training.distributed.shares import NoiseShare, RankNoise, add_noise_alone

PROGRAMS = "tests.support.rank_programs:"
SIGMA, BOUND, COUNT = 1.3, 0.7, 4000
ALPHA = 1e-4


def residuals(processes, ranks, mistake="", relation="add_or_remove_one"):
    """What is released beyond the sum of the clipped values, (2, COUNT); the same on every rank."""
    values = [torch.randn(COUNT), torch.randn(COUNT)]
    totals = processes.run(ranks, PROGRAMS + "noisy_totals", mistake, values, BOUND, SIGMA, relation)
    for other in totals[1:]:
        assert all(torch.equal(a, b) for a, b in zip(totals[0], other, strict=True))
    factor = sum(range(1, ranks + 1))
    return torch.stack([total - factor * value for total, value in zip(totals[0], values, strict=True)])


@pytest.mark.parametrize(("ranks", "relation", "bound"), [(2, "add_or_remove_one", 1), (3, "replace_one", 2)])
def test_the_sum_of_all_shares_has_the_noise_of_one_process(processes, ranks, relation, bound):
    scale = SIGMA * bound * BOUND
    noise = residuals(processes, ranks, relation=relation)
    assert min(noise_law_p_values(noise, scale)) > ALPHA
    for wrong in (2 / 3, 3 / 2):
        assert min(noise_law_p_values(noise, wrong * scale)) < ALPHA
    cosine = torch.nn.functional.cosine_similarity(noise[0], noise[1], dim=0)
    assert abs(cosine) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize(
    ("mistake", "scale"), [("forget", 1 / math.sqrt(2)), ("full", math.sqrt(2)), ("average", None)]
)
def test_negative_control_mistakes_with_the_shares_are_seen(processes, mistake, scale):
    """A rank that forgets its share; every rank adding all of the noise; an average in place of the sum."""
    noise = residuals(processes, 2, mistake)
    assert min(noise_law_p_values(noise, SIGMA * BOUND)) < ALPHA
    if scale is not None:  # and it is the mistake that it is meant to be
        assert min(noise_law_p_values(noise, scale * SIGMA * BOUND)) > ALPHA


class Ones(NoiseSource):
    """A source in which every number is 1, so that a share shows its factor as it was rounded."""

    is_private = False

    def normal(self, shape, *, dtype=torch.float32, device="cpu"):
        return torch.ones(tuple(shape), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_shares_never_add_up_to_less_than_all_of_the_noise(dtype):
    for ranks in range(1, 500):
        (factor,) = NoiseShare(Ones(), ranks).normal((1,), dtype=dtype).tolist()
        assert 1 <= Fraction(factor) ** 2 * ranks <= 1 + 8 * torch.finfo(dtype).eps


def test_a_share_is_as_private_as_its_source():
    seeded = SeededNoise(0, reproducibility_over_privacy=True)
    assert NoiseShare(SecureNoise(), 2).is_private
    assert not NoiseShare(seeded, 2).is_private
    assert not RankNoise(seeded, 1).is_private


def test_seeded_noise_differs_between_ranks_and_has_one_state(processes):
    (first, state), (second, other_state) = processes.run(2, PROGRAMS + "seeded_noise", 3, [(2, 5), (5,), (7,)])
    for one, other in zip(first, second, strict=True):
        assert one.shape == other.shape
        assert not torch.isclose(one, other).any()
    assert torch.equal(state["generator"], other_state["generator"])
    again = RankNoise(SeededNoise(3, reproducibility_over_privacy=True), 1)
    assert torch.equal(again.normal((2, 5)), second[0])
    resumed = RankNoise(SeededNoise(8, reproducibility_over_privacy=True), 1)
    again.normal((5,))
    again.normal((7,))
    resumed.load_state_dict(state)  # of rank 0
    assert torch.equal(resumed.normal((3,)), again.normal((3,)))


def test_the_noise_of_a_rank_is_normal():
    drawn = RankNoise(SeededNoise(3, reproducibility_over_privacy=True), 1).normal((COUNT,))
    assert min(noise_law_p_values(drawn, 1.0)) > ALPHA


def test_a_group_that_came_after_make_private_is_refused(monkeypatch):
    class Two:
        size = 2

    sums = [Clipped(torch.zeros(3), 1.0)]
    (released,) = add_noise_alone(sums, 1.0, SecureNoise(), Relation.ADD_OR_REMOVE_ONE)
    assert released.any()
    monkeypatch.setattr(shares, "current_ranks", Two)
    with pytest.raises(RuntimeError, match="init_process_group\\(\\) before make_private"):
        add_noise_alone(sums, 1.0, SecureNoise(), Relation.ADD_OR_REMOVE_ONE)
