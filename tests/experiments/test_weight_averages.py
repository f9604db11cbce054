"""Averages of weights: the recursion they promise, several at once, none where none is asked for, checkpoints."""

import pytest
import torch
from torch import nn

from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.experiments.weight_averages import WeightAverages


def averages(model, **options):
    return WeightAverages(model, Settings(validation_size=10, **options).resolved())


def walk(model, kept, steps=4):
    """Moves the weights, and yields them after each step."""
    for step in range(steps):
        with torch.no_grad():
            model.weight.fill_(float(step + 1) ** 2)
        kept.update()
        yield model.weight.clone()


def test_every_average_follows_its_decay():
    model = nn.Linear(1, 1, bias=False)
    kept = averages(model, ema_decay=0.5, ema_candidates=[0.9, 0.0])
    expected = {0.5: None, 0.9: None}
    for weight in walk(model, kept):  # the first weights are taken as they are
        expected = {d: weight if e is None else d * e + (1 - d) * weight for d, e in expected.items()}
    assert torch.allclose(kept.result.weight, expected[0.5])
    found = {decay: module.weight for decay, module in kept.candidates()}
    assert list(found) == [0.0, 0.9]
    assert torch.allclose(found[0.9], expected[0.9])
    assert torch.equal(found[0.0], model.weight), "a decay of 0 is no average"


def test_without_a_decay_the_result_is_the_model_itself():
    model = nn.Linear(1, 1, bias=False)
    kept = averages(model)
    assert kept.result is model
    assert not list(kept.candidates())
    assert kept.state_dict() == {}


def test_a_checkpoint_holds_all_of_them():
    model, options = nn.Linear(1, 1, bias=False), {"ema_decay": 0.9999999, "ema_candidates": [0.9, 0.9999995]}
    kept = averages(model, **options)
    list(walk(model, kept))
    state = kept.state_dict()
    other = averages(nn.Linear(1, 1, bias=False), **options)
    other.load_state_dict(state)
    assert torch.equal(other.result.weight, kept.result.weight)
    assert torch.equal(dict(other.candidates())[0.9].weight, dict(kept.candidates())[0.9].weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema_candidates": [0.9], "validation_size": 0}, "not on the test set: give validation_size"),
        ({"ema_candidates": [1.0], "validation_size": 10}, "ema_candidates must be in"),
    ],
)
def test_candidates_that_cannot_be_compared_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        Settings(**options)
