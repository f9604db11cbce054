"""Trial runs: what they tell, and that they leave nothing behind."""

import torch
from torch import nn

from spectral_dp.gradients.recording.trial import Origins, Trial, run_both, without_trace


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


def test_both_runs_and_the_number_of_samples_are_handed_over():
    seen = []

    def run(rows):
        trial = Trial(Origins(nn.Identity()))
        trial.seed("layer", 1, torch.arange(5.0)[rows])
        return trial

    run_both(run, 5, lambda whole, rest, samples: seen.append((whole, rest, samples)))
    ((whole, rest, samples),) = seen
    assert [t.entries[0].results[0].tolist() for t in (whole, rest)] == [[0, 1, 2], [1, 2]]
    assert samples == 3


def test_a_parameter_says_that_it_needs_a_gradient():
    trial = Trial(Origins(nn.Identity()))
    with torch.no_grad():
        assert trial.seed("gate", 1, torch.ones(2), needs_gradient=True).requires_grad
        assert not trial.seed("layer", 2, torch.ones(2)).requires_grad
