"""Trial runs: what they tell, and that they leave nothing behind."""

import pytest
import torch
from torch import nn

from spectral_dp.gradients.recording.trial import Knowledge, Origins, Trial, run_both, without_trace


def learn(make, samples=3):
    """What two runs of ``make(samples at hand, seed)`` tell."""
    torch.manual_seed(0)
    x, knowledge, root = torch.randn(samples, 2, 4), Knowledge(), nn.Identity()
    layer = nn.Identity()

    def run(rows):
        trial = Trial(Origins(root))
        make(x[rows], lambda value, by=None: trial.seed("layer", trial.origins.of_call(layer), value, by))
        return trial

    run_both(run, samples, knowledge)
    return knowledge


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda x: torch.ones(3, 4), "shared"),
        (lambda x: x * 2, "rows"),
        (lambda x: x.flatten(0, 1), "rows"),
        (lambda x: x.transpose(0, 1).flatten(0, 1), "unknown"),
        (lambda x: x.sum(0), "unknown"),
    ],
)
def test_how_the_output_of_a_layer_belongs_to_the_samples(value, expected):
    assert list(learn(lambda x, seed: seed(value(x))).layers.values()) == [expected]


def test_samples_in_another_dimension_are_compared_where_they_are_said_to_be():
    time_first = learn(lambda x, seed: seed(x.transpose(0, 1)))
    told = learn(lambda x, seed: seed(x.transpose(0, 1), x))
    assert (list(time_first.layers.values()), list(told.layers.values())) == (["unknown"], ["rows"])


def test_operations_on_what_is_shared_are_told_apart():
    def make(x, seed):
        table = seed(torch.ones(2, 4)) * 2
        return table + x

    of_table, with_samples = learn(make).operations.values()
    assert (of_table.relation, with_samples.relation) == ("shared", "rows")
    assert with_samples.batched == (False, True)


def test_samples_that_meet_are_noticed():
    assert learn(lambda x, seed: seed(x) * 2).meets is None
    assert learn(lambda x, seed: seed(x - x.mean(0))).meets == "layer"


def test_origins_are_the_same_in_every_pass():
    root, layer = nn.Identity(), nn.Identity()
    first, second = Origins(root), Origins(root)
    calls = [first.of_call(layer), first.of_call(layer)]
    assert calls == [second.of_call(layer), second.of_call(layer)]
    assert calls[0] != calls[1]
    assert first.of_parameter(layer, "gate") == second.of_parameter(layer, "gate")


def test_without_a_trace():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    state, fast = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    with without_trace(model):
        assert not model.training
        assert not torch.is_grad_enabled()
        assert not torch.backends.mha.get_fastpath_enabled(), "it would not call the layers of a transformer"
        torch.randn(3)
        model[0].running_mean.add_(1)
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    assert torch.equal(torch.get_rng_state(), state)
    assert not bool(model[0].running_mean.any())
    assert torch.backends.mha.get_fastpath_enabled() == fast
