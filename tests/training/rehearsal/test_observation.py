"""Sketched sums add like the sums, and are about as long."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_dp.gradients import ModelGradients
from spectral_dp.training.rehearsal.observation import KINDS, Observation, _sketch, has_other_scale, mismatch, observe

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
X, Y = torch.randn(9, 20), torch.arange(9) % 4


def observed(rows, reduction="mean"):
    gradients = ModelGradients(MODEL)
    F.cross_entropy(MODEL(X[rows]), Y[rows], reduction=reduction).backward()
    observation = observe(gradients, gradients.take_all(), reduction, 0.0)
    gradients.remove()
    return observation


def test_sums_over_disjoint_batches_add_up():
    whole, parts = observed(slice(None)), [observed(slice(0, 4)), observed(slice(4, 9))]
    assert mismatch("mean", [whole], parts) < 1e-5
    assert mismatch("direction", [whole], parts) < 1e-5
    assert mismatch("sum", [whole], parts) > 0.1, "the loss was a mean: as recorded they do not add up"


def test_a_sum_is_told_from_a_mean():
    whole, parts = observed(slice(None), "sum"), [observed(slice(0, 4), "sum"), observed(slice(4, 9), "sum")]
    assert mismatch("sum", [whole], parts) < 1e-5
    assert mismatch("mean", [whole], parts) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_another_record_is_seen(kind):
    assert mismatch(kind, [observed(slice(0, 4))], [observed(slice(1, 5))]) > 0.05


def test_sketches_are_linear_and_about_as_long_as_what_they_are_of():
    a, b = nn.Parameter(torch.randn(50, 70)), nn.Parameter(torch.randn(5000))
    blocks = [[a], [b]]
    sums = {a: torch.randn(50, 70), b: torch.randn(5000)}
    sketch = _sketch(blocks, sums)
    twice = _sketch(blocks, {p: 2 * t for p, t in sums.items()})
    torch.testing.assert_close(twice, 2 * sketch)
    for row, parameter in zip(sketch, (a, b), strict=True):
        assert 0.6 < float(row.norm()) / float(sums[parameter].norm()) < 1.5


def test_samples_that_are_not_finite_are_left_out():
    gradients = ModelGradients(MODEL)
    bad = torch.cat([X[:4], torch.full((1, 20), torch.nan)])
    F.cross_entropy(MODEL(bad), Y[:5], reduction="sum").backward()
    observation = observe(gradients, gradients.take_all(), "sum", 0.0)
    gradients.remove()
    assert mismatch("sum", [observation], [observed(slice(0, 4), "sum")]) < 1e-5
    assert observation.samples == 5


def test_an_empty_batch_is_nothing():
    observation = observed(slice(0, 0), "sum")
    assert observation.samples == 0
    assert all(not observation.sums[kind].any() for kind in KINDS)
    assert mismatch("sum", [observation], [observation]) == 0


def test_gradients_of_next_to_nothing_count_for_little():
    """Their direction is rounding; that of the others is not changed much."""
    gradients = ModelGradients(MODEL)
    weights = torch.ones(9)
    weights[0] = 1e-7

    def observation(floor):
        (F.cross_entropy(MODEL(X), Y, reduction="none") * weights).sum().backward()
        return observe(gradients, gradients.take_all(), "sum", floor)

    with_floor, without = observation(None), observation(0.0)
    gradients.remove()
    assert 0 < with_floor.floor < 0.1
    without_the_first = observed(slice(1, 9), "sum")
    assert mismatch("direction", [with_floor], [without_the_first]) < 0.02
    assert mismatch("direction", [without], [without_the_first]) > 0.1


@pytest.mark.parametrize("announced", ["mean", "sum"])
def test_the_scale_of_a_loss_contradicts_the_other_reduction_only(announced):
    """Catches a sign, or a factor of the batch size, that is the wrong way round."""
    lengths = {"mean": lambda size: 1 / size, "sum": lambda size: 1.0}
    for reduction, length in lengths.items():
        passes = [Observation({}, length(size), size, 0.0, 0.0) for size in (8, 7, 3, 2)]
        assert has_other_scale(passes, announced, 3) is (reduction != announced)
    assert not has_other_scale([Observation({}, 1.0, 8, 0.0, 0.0)], announced, 3), "there is no small batch"
