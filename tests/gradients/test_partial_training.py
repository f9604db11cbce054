"""Adapters and partial training: exact, and frozen layers cost what they cost in plain PyTorch.

Counted beside plain PyTorch with the same layers frozen: multiplications, numbers written, the largest tensor, and the
bytes that are held between the forward and the backward pass.
"""

import copy

import pytest
import torch
from tests.support.recorded_models import check
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.recording.recorder import Recorder
from spectral_dp.gradients.rules.linear import LinearRule

WIDTH, TOKENS, BATCH = 32, 24, 16


class Block(nn.Module):
    """Attention and a two-layer network, as in any transformer."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        x = x + self.out(torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Head(nn.Linear):
    """The mean over tokens, then a dense layer."""


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv1d(4, WIDTH, 2, stride=2)
        self.blocks, self.head = nn.Sequential(Block(), Block(), Block()), Head(WIDTH, 5)

    def forward(self, x):
        return self.head(self.blocks(self.patches(x).mT).mean(1))


class LowRank(nn.Module):
    """A frozen dense layer and a trained product of two narrow ones, as LoRA has them."""

    def __init__(self, linear, rank=4):
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def train_only(says_so):
    def choose(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(says_so(name))
        return model

    return choose


def with_adapters(model):
    model.requires_grad_(False)
    for block in model.blocks:
        block.query, block.value = LowRank(block.query), LowRank(block.value)
    return model


def with_peft(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], r=4, lora_dropout=0.0))


# How much more than plain: multiplications, numbers written. Norms and sums of dense layers take the place of the
# plain weight gradients and about as much again. What is counted of frozen layers is that the model is compared before
# and after (``StateGuard``): its size, whatever the batch.
KINDS = {
    "adapters": (with_adapters, 1.1, 1.2),
    "peft": (with_peft, 1.1, 1.2),
    "biases only": (train_only(lambda name: name.endswith("bias")), 1.01, 1.3),
    "norms only": (train_only(lambda name: "norm" in name), 1.01, 1.2),
    "last layer only": (train_only(lambda name: name.startswith("head")), 1.01, 1.1),
    "last block and head": (train_only(lambda name: name.startswith(("blocks.2", "head"))), 1.3, 2.0),
    "the first layer only": (train_only(lambda name: name.startswith("patches")), 1.1, 1.1),
}


@pytest.fixture(params=KINDS, name="kind")
def _kind(request):
    return KINDS[request.param]


def records(n=BATCH):
    torch.manual_seed(1)
    return torch.randn(n, 4, 2 * TOKENS)


def test_gradients_are_those_of_the_loop(kind):
    check(kind[0](Network()).double(), records(3).double())


def test_frozen_layers_have_no_tap(kind, monkeypatch):
    tapped, tap = [], Recorder._tap
    monkeypatch.setattr(Recorder, "_tap", lambda self, module, *rest: tapped.append(module) or tap(self, module, *rest))
    model = kind[0](Network())
    gradients = ModelGradients(model)
    model(records())
    gradients.remove()
    assert all(any(p.requires_grad for p in module.parameters(recurse=False)) for module in tapped)
    assert {p for m in tapped for p in m.parameters() if p.requires_grad} == set(gradients.trained)


class Tally(TorchDispatchMode):
    """Counts the numbers that operations write, views apart."""

    def __init__(self):
        super().__init__()
        self.numbers, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [] if func.is_view else [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        sizes = [t.numel() for t in tensors if not t.is_meta]
        self.numbers += sum(sizes)
        self.largest = max(self.largest, *sizes, 0)
        return out


def held(forward):
    """Bytes that are allocated in a forward pass and not given back by its end, and what it returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        out = forward()
    events = profiler.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]"), out


def costs(model, *, private):
    """Multiplications, numbers, largest tensor of a pass with norms and clipped sums, and what is held in between."""
    gradients, x = ModelGradients(model) if private else None, records()

    def step():
        model(x).square().sum().backward()
        if gradients is not None:
            batch = gradients.take()
            batch.clipped_sums(batch.squared_norms().sum(0).rsqrt())
        model.zero_grad()

    step()  # what is made once is not part of a step
    with FlopCounterMode(display=False) as arithmetic:
        step()
    with Tally() as tally:
        step()
    bytes_held, _out = held(lambda: model(x))
    if gradients is not None:
        gradients.remove()
    return arithmetic.get_total_flops(), tally.numbers, tally.largest, bytes_held


def check_costs(choose, flops, numbers):
    model = choose(Network())
    ours, plain = costs(copy.deepcopy(model), private=True), costs(model, private=False)
    limits = {"flops": flops, "numbers": numbers, "largest": 1.0, "held": 1.01}
    for (what, limit), a, b in zip(limits.items(), ours, plain, strict=True):
        assert a <= limit * b, f"{what} over plain: {a / b:.3f}"


def test_costs_are_those_of_plain_training_with_the_same_layers_frozen(kind):
    check_costs(*kind)


class TestControls:
    """Each makes frozen parts cost something, and must not pass."""

    def test_inputs_of_layers_of_which_only_the_bias_is_trained(self, monkeypatch):
        monkeypatch.setattr(LinearRule, "needs_input", lambda _: True)
        with pytest.raises(AssertionError, match="held over plain"):
            check_costs(*KINDS["biases only"])

    def test_taps_on_frozen_layers(self, monkeypatch):
        begin = Recorder._before

        def before(self, module, args):
            begin(self, module, args)
            if module in self._watched and not self._pauses:
                self._frozen[module] = self._watched[module]
                self._sides[module] = type("Nothing", (), {"written_buffers": dict, "refuse": lambda *_: []})()

        monkeypatch.setattr(Recorder, "_before", before)
        with pytest.raises(AssertionError, match="over plain"):
            check_costs(*KINDS["last layer only"])
