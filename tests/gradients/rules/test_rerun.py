"""A recorded call run again: the same output, each sample alone, and the module left as it was."""

import contextlib

import pytest
import torch
from tests.support.oracle import relative_error, sample_gradients
from torch import nn
from torch.nn.utils import parametrizations

from spectral_dp.gradients.recording.call import Call
from spectral_dp.gradients.rules.rerun import NotPerSampleError, Rerun, left_as_it_was


class Shifted(nn.Module):
    """Takes a tensor of the batch, one that all samples share, and an option."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 2), 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, shift, *, power=1):
        self.calls += 1
        self.count += 1
        return self.linear(x + shift) ** power


def rerun_of(module, *args, samples=4, dtype=torch.float64, **kwargs):
    trained = {name: p.detach() for name, p in module.named_parameters()}
    return Rerun(module, Call(args, kwargs), samples, dtype), trained, dict(module.named_buffers())


@pytest.mark.parametrize("way", ["side_by_side", "one_by_one"])
def test_gradients_and_outputs_are_those_of_each_sample_alone(way):
    module = Shifted().double()
    x, shift, dA = torch.randn(4, 3).double(), torch.randn(3).double(), torch.randn(4, 2).double()
    rerun, trained, rest = rerun_of(module, x, shift, power=2)
    together = rerun.together(trained, rest)
    gradients, outputs = getattr(rerun, way)(trained, {name: b.clone() for name, b in rest.items()}, dA)
    torch.testing.assert_close(outputs, together)
    torch.testing.assert_close(together, module(x, shift, power=2))

    class OfOneInput(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x, shift, power=2)

    for name, expected in sample_gradients(OfOneInput(), (x,), dA).items():
        assert relative_error(gradients[name.removeprefix("module.")], expected) < 1e-9


def test_inputs_are_copied_in_the_precision_asked_for():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x.mul_(2) * self.weight

    x = torch.ones(4, 3)
    rerun, trained, rest = rerun_of(InPlace(), x, dtype=torch.float32)
    assert rerun.together(trained, rest).unique().tolist() == [2.0]
    assert x.unique().tolist() == [1.0], "the backward pass under way needs the input as it was"
    rerun, trained, rest = rerun_of(InPlace().double(), x.bfloat16())
    assert rerun.together(trained, rest).dtype == torch.float64


def test_a_module_that_returns_one_entry_for_all_samples_is_refused():
    class Summing(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum(0)

    rerun, trained, rest = rerun_of(Summing(3, 4), torch.randn(4, 3), dtype=torch.float32)
    with pytest.raises(NotPerSampleError, match="Summing, given one sample") as error:
        rerun.one_by_one(trained, rest, torch.randn(4))
    assert not any(digit in str(error.value) for digit in "0123456789"), "the realised batch size is private"


def test_own_hooks_do_not_run_on_the_input_again():
    layer = nn.Linear(3, 2).double()
    x = torch.randn(4, 3).double()
    seen = []
    layer.register_forward_pre_hook(lambda module, args: (seen.append(args[0]), (2 * args[0],))[1])
    layer.register_forward_hook(lambda module, args, out: out.exp())
    rerun, trained, rest = rerun_of(layer, x)
    torch.testing.assert_close(rerun.together(trained, rest), nn.functional.linear(x, layer.weight, layer.bias))
    assert len(seen) == 1, "hooks before the forward pass may compute the weight: they run, on a copy"


class TestLeftAsItWas:
    def test_attributes_lists_and_dictionaries(self):
        module = nn.Linear(2, 2)
        module.history, module.cache, module.calls = [1], {"a": 1}, 0
        history, cache = module.history, module.cache
        with left_as_it_was(module):
            module.history.append(2)
            module.cache["b"] = 2
            module.calls += 1
            module.new = "attribute"
        assert (module.history, module.cache, module.calls) == ([1], {"a": 1}, 0)
        assert module.history is history
        assert module.cache is cache
        assert not hasattr(module, "new")

    def test_spectral_norms_do_not_iterate_inside_and_do_afterwards(self):
        module = parametrizations.spectral_norm(nn.Linear(6, 6))
        (norm,) = module.parametrizations["weight"]
        with left_as_it_was(module):
            assert norm.n_power_iterations == 0
            before = norm._u.clone()
            module(torch.randn(2, 6))
            assert torch.equal(norm._u, before)
        assert norm.n_power_iterations == 1
        module(torch.randn(2, 6))
        assert not torch.equal(norm._u, before)

    def test_after_an_error_too(self):
        module = nn.Linear(2, 2)
        with contextlib.suppress(KeyError), left_as_it_was(module):
            module.new = 1
            raise KeyError
        assert not hasattr(module, "new")
