"""What a forward pass leaves on its module: a loss that depends on it is an error, and nothing else changes."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from tests.support.uses import keep_all
from torch import nn

from spectral_dp.gradients.recording.recorder import Recorder


class Named(NamedTuple):
    loss: torch.Tensor
    count: int


class Storing(nn.Module):
    """Stores an auxiliary loss, and what it is made of, in all the ways there are."""

    def __init__(self):
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(3)), nn.Identity()
        self.losses, self.by_name = [], {}

    def forward(self, x):
        hidden = (x * self.weight).exp()
        self.penalty = hidden.square().mean()
        self.inner.penalty = hidden.abs().mean()
        self.pair = (hidden, self.weight.square().sum())
        self.named = Named(hidden.max(), 3)
        self.losses.append(hidden.mean())
        self.by_name["penalty"] = hidden.sum()
        self.count = torch.tensor(len(self.losses))
        return hidden * 2


WAYS = {
    "attribute": lambda m: m.penalty,
    "attribute of a part": lambda m: m.inner.penalty,
    "tuple": lambda m: m.pair[1],
    "named tuple": lambda m: m.named.loss,
    "list": lambda m: m.losses[-1],
    "dictionary": lambda m: m.by_name["penalty"],
}


def watch(model):
    return Recorder({m: tuple(m.parameters(recurse=False)) for m in model.modules() if m._parameters}, keep_all)


@pytest.fixture(params=[False, True], ids=["first layer", "second layer"])
def model(request):
    """Behind another layer its input needs a gradient, and what it stores is part of the graph."""
    return nn.Sequential(nn.Linear(3, 3) if request.param else nn.Identity(), Storing())


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_depends_on_a_stored_tensor_is_an_error(model, way):
    with watch(model):
        loss = model(torch.randn(4, 3)).sum() + WAYS[way](model[1])
        with pytest.raises(RuntimeError, match=r"Storing stored in its forward pass.*outside of the module"):
            loss.backward()


def test_stored_tensors_that_the_loss_does_not_use_are_no_matter(model):
    """Attention maps to look at, say; also where they lie on the way to the output."""
    with watch(model) as recorder:
        model(torch.randn(4, 3)).sum().backward()
        assert model[1] in recorder.take()


def test_the_error_is_not_raised_by_what_was_stored_before(model):
    model(torch.randn(4, 3))
    constant = model[1].pair = torch.ones(3)
    with watch(model) as recorder:
        (model(torch.randn(4, 3)) * constant).sum().backward()
        assert model[1] in recorder.take()


def test_control_unwatched_the_weights_get_a_gradient_of_it(model):
    """Which is what would be missing, silently."""
    model(torch.randn(4, 3))
    model[1].penalty.backward()
    assert float(model[1].weight.grad.abs().sum()) > 0


def test_stored_inputs_and_outputs_are_what_they_are():
    class Keeping(nn.Linear):
        def forward(self, x):
            self.given, self.returned = x, super().forward(x).T
            return self.returned

    model = nn.Sequential(nn.Linear(3, 3), Keeping(3, 2))
    with watch(model) as recorder:
        out = model(torch.randn(4, 3))
        assert model[1].returned is out, "a view is copied before it is hooked"
        (model[1].returned.sum() + model[1].given.sum()).backward()
        captures = recorder.take()
    assert set(captures) == {model[0], model[1]}
    assert torch.equal(captures[model[1]][0].kept.dA, torch.ones(2, 4))


def test_a_state_that_is_carried_from_call_to_call_is_an_error():
    """The second output depends on the first call's weights through it."""

    class Cell(nn.Linear):
        state = 0.0

        def forward(self, x):
            self.state = torch.tanh(super().forward(x) + self.state)
            return self.state * 1

    model = Cell(3, 3)
    with watch(model):
        model(torch.randn(4, 3))
        with pytest.raises(RuntimeError, match="stored in its forward pass"):
            model(torch.randn(4, 3)).sum().backward()


def test_afterwards_the_module_holds_its_own_tensors_again(model):
    with watch(model) as recorder:
        model(torch.randn(4, 3)).sum().backward()
        recorder.take()
    stored = [model[1].penalty, *model[1].pair, *model[1].losses, *model[1].by_name.values()]
    assert all(not t._backward_hooks for t in stored)
    if isinstance(model[0], nn.Identity):  # then no graph is behind them
        assert not any(t.requires_grad for t in stored)
        copy.deepcopy(model)
        pickle.dumps(model)


def test_a_running_tensor_does_not_grow_a_graph():
    class Running(nn.Linear):
        def forward(self, x):
            self.steps = getattr(self, "steps", torch.zeros(())) + 1
            return super().forward(x)

    model = Running(3, 2)
    with watch(model) as recorder:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            recorder.take()
    assert float(model.steps) == 3
    assert model.steps.grad_fn is None


def test_written_buffers_are_recorded_as_the_forward_pass_left_them():
    class Writing(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("other", torch.zeros(5))

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = Writing()
    with watch(model) as recorder:
        (model(torch.randn(4, 3)).sum() + model(torch.randn(4, 3)).sum()).backward()
        first, second = sorted(float(c.kept.x.buffers["calls"]) for c in recorder.take()[model])
    assert (first, second) == (1, 2)
    assert float(model.calls) == 2


def test_outputs_are_recorded_where_asked_for_and_unchanged():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU(inplace=True))
    watched = {m: tuple(m.parameters()) for m in model[:2]}
    with Recorder(watched, keep_all, with_output=[model[0], model[1]]) as recorder:
        model(torch.randn(4, 3)).sum().backward()
        captures = recorder.take()
    assert captures[model[0]][0].kept.x.output.shape == (4, 3)
    assert captures[model[1]][0].kept.x.output is None, "the activation overwrote it"
    with watch(model) as recorder:
        model(torch.randn(4, 3)).sum().backward()
        assert recorder.take()[model[0]][0].kept.x.output is None
