"""A layer that computes something else than its kind must not use the rule of its kind: it would be silently wrong."""

import pytest
import torch
from tests.support.recorded_models import check, images, run
from torch import nn
from torch.nn import functional as F

from spectral_dp.gradients import GhostRule, ModelGradients, register_rule
from spectral_dp.gradients.rules.registry import _RULES, find_rule

pytestmark = pytest.mark.filterwarnings("ignore:no rule for")


def tokens(*shape):
    return torch.randn(4, *shape, 6, dtype=torch.float64)


class InnerStep(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(2 * x, weight, bias)


class Mixin:
    def _conv_forward(self, x, weight, bias):
        return F.conv2d(x, weight.flip(-1), bias)


class Mixed(Mixin, nn.Conv2d):
    pass


class Computed(nn.Linear):
    """Its ``weight`` is a property over the parameter of that name."""

    @property
    def weight(self):
        if "weight" not in self._parameters:
            raise AttributeError
        return 3 * self._parameters["weight"]


class Looked(nn.Linear):
    def __getattr__(self, name):
        found = super().__getattr__(name)
        return 2 * found if name == "weight" else found


def patched(layer, name, function):
    setattr(layer, name, function)
    return layer


OVERRIDING = [
    pytest.param(lambda: InnerStep(2, 3, 3), images, id="a method that forward calls"),
    pytest.param(lambda: Mixed(2, 3, 3), images, id="a mixin"),
    pytest.param(lambda: Computed(6, 2), tokens, id="a property"),
    pytest.param(lambda: Looked(6, 2), tokens, id="__getattr__"),
    pytest.param(
        lambda: patched(nn.Conv2d(2, 3, 3), "_conv_forward", lambda x, w, b: F.conv2d(2 * x, w, b)),
        images,
        id="a patched instance",
    ),
]


@pytest.mark.parametrize(("make", "inputs"), OVERRIDING)
def test_what_forward_uses_cannot_be_overridden_unnoticed(make, inputs):
    layer = make()
    assert find_rule(layer) is None
    check(nn.Sequential(layer).double(), inputs())


@pytest.mark.parametrize(("make", "inputs"), OVERRIDING)
def test_control_the_rule_of_the_parent_would_be_wrong(make, inputs, monkeypatch):
    """Exactness would notice: these overrides change the gradient."""
    monkeypatch.setattr("spectral_dp.gradients.rules.registry.overrides", lambda *_: [])
    with pytest.raises(AssertionError):
        check(nn.Sequential(make()).double(), inputs())


class Harmless(nn.Conv2d):
    """Overrides what no forward pass uses, and sets what the rule reads."""

    stride_of_mine = 3

    def __init__(self, *sizes):
        super().__init__(*sizes, stride=2)
        self.padding = (1, 1)

    def reset_parameters(self):
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.bias)

    def extra_repr(self):
        return "mine"

    def weight_norm_of_mine(self):
        return self.weight.norm()


def test_other_subclasses_keep_the_fast_rule():
    layer = Harmless(2, 3, 3)
    assert find_rule(layer) is _RULES[nn.Conv2d]
    check(nn.Sequential(layer).double(), images())


def test_a_patched_class_is_noticed(monkeypatch):
    """As some libraries do to every layer of the process."""
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: F.linear(2 * x, self.weight, self.bias))
    assert find_rule(nn.Linear(6, 2)) is None
    check(nn.Sequential(nn.Linear(6, 2)).double(), tokens())


def test_a_layer_patched_after_it_was_made_private_is_refused():
    layer = nn.Linear(6, 2)
    gradients = ModelGradients(nn.Sequential(layer))
    layer.forward = lambda x: F.linear(2 * x, layer.weight, layer.bias)
    layer(torch.randn(3, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'0' got \['forward'\]"):
        gradients.take()
    gradients.remove()


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 2), lambda: patched(nn.Linear(6, 2), "note", lambda: None)])
def test_hooks_on_a_layer_are_outside_of_what_its_rule_sees(make):
    """What is recorded is the input after pre-hooks and the gradient before forward hooks."""
    layer = make()
    layer.register_forward_pre_hook(lambda module, args: (torch.sin(args[0]),))
    layer.register_forward_hook(lambda module, args, out: out.exp())
    check(nn.Sequential(layer).double(), tokens())


def test_a_rule_that_forgets_a_parameter_is_an_error():
    class Affine(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

        def forward(self, x):
            return x * self.weight + self.shift

    @register_rule(Affine)
    class AffineRule(GhostRule[Affine]):
        def squared_norms(self, x, dA):
            return (x * dA).square().sum(1)

        def clipped_sum(self, x, dA, c):
            return {"weight": c.to(x.dtype) @ (x * dA)}

        def form(self, x, dA):
            return {"weight": x * dA}

    try:
        gradients, batch, _ = run(nn.Sequential(Affine()), torch.randn(4, 6))
        gradients.remove()
        with pytest.raises(RuntimeError, match=r"no gradient of \['shift'\]"):
            batch.clipped_sums(torch.ones(4))
    finally:
        del _RULES[Affine]
