"""One release of a clipped sum: charged before it is noised, with the bound that its parts declare."""

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.silent import Silent

from spectral_dp import Relation
from spectral_dp.accounting import Ledger
from spectral_dp.mechanism.clipping import Clipped, clip_and_sum
from spectral_dp.mechanism.noise import SeededNoise
from spectral_dp.mechanism.release import release_sum


def parts(*sizes, bound=2.0):
    return [clip_and_sum(torch.randn(size, 5).double(), bound) for size in sizes]


def test_it_is_the_sum_of_the_parts():
    given = parts(3, 0, 4)
    released = release_sum(given, noise_multiplier=1.0, ledger=Ledger(), noise=Silent())
    assert torch.allclose(released, sum(part.value for part in given))


@pytest.mark.parametrize("relation", list(Relation))
def test_noise_has_the_claimed_law_and_no_other(relation):
    """Accepts the right scale, and rejects two thirds and three halves of it."""
    empty = Clipped(torch.zeros(4000).double(), 2.0)
    noise = SeededNoise(1, reproducibility_over_privacy=True)
    drawn = np.asarray(release_sum([empty], noise_multiplier=3.0, ledger=Ledger(relation), noise=noise))
    scale = 3.0 * 2.0 * (1 if relation is Relation.ADD_OR_REMOVE_ONE else 2)
    p_value = {f: stats.kstest(drawn / (f * scale), "norm").pvalue for f in (2 / 3, 1, 3 / 2)}
    assert p_value[1] > 1e-3
    assert max(p_value[2 / 3], p_value[3 / 2]) < 1e-6


def test_it_is_noised_by_default_and_never_twice_alike():
    one, two = (release_sum(parts(0), noise_multiplier=1.0, ledger=Ledger()) for _ in range(2))
    assert not torch.equal(one, two)


def test_it_is_charged_before_it_is_released():
    """Catches a release that a failure between the two would leave uncharged."""
    ledger = Ledger()

    class Failing(Silent):
        def normal(self, shape, **_):
            assert ledger.phases == ((8.0, 1.0, 1),)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        release_sum(parts(3), noise_multiplier=8.0, ledger=ledger, noise=Failing())
    assert ledger.steps == 1


@pytest.mark.parametrize(
    "given",
    [
        [],
        [*parts(2, bound=1.0), *parts(2, bound=2.0)],
        [*parts(2), Clipped(torch.ones(1).double(), 2.0)],
        [*parts(2), Clipped(torch.ones(3, 5).double(), 2.0)],
    ],
    ids=["none", "two bounds", "a number beside a row", "a row beside a matrix"],
)
def test_what_has_no_one_bound_is_refused_and_not_charged(given):
    """Of two shapes, the smaller would be added to every row of the larger, and exceed its bound there."""
    ledger = Ledger()
    with pytest.raises(ValueError, match=r"no part|one bound|one shape"):
        release_sum(given, noise_multiplier=1.0, ledger=ledger)
    assert ledger.steps == 0


def test_records_that_carry_gradients_are_released_without_them():
    """Catches a release that fails after it was charged: features of a network come with gradients."""
    ledger = Ledger()
    records = torch.randn(3, 5, requires_grad=True)
    released = release_sum((clip_and_sum(records, 2.0) for _ in range(2)), noise_multiplier=1.0, ledger=ledger)
    already = release_sum([clip_and_sum(records, 2.0)], noise_multiplier=1.0, ledger=ledger)
    assert not released.requires_grad
    assert not already.requires_grad
    assert ledger.steps == 2


def test_several_processes_that_do_not_know_each_other_are_refused_and_nothing_is_charged(monkeypatch):
    """Where they know each other, tests/training/distributed/test_joining.py tries it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    ledger = Ledger()
    with pytest.raises(RuntimeError, match="these 2 processes would make this release"):
        release_sum(parts(3), noise_multiplier=1.0, ledger=ledger)
    assert ledger.steps == 0
    monkeypatch.setenv("WORLD_SIZE", "1")
    release_sum(parts(3), noise_multiplier=1.0, ledger=ledger)
    assert ledger.steps == 1
