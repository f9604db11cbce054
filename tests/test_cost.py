"""What a private step costs, counted in operations and numbers, not seconds: no path may fall back to a slow one.

The same models and steps as in ``benchmarks/``, at small batches. Limits are about a tenth above what was counted; what
they are meant to catch costs a third more or several times as much, as the controls show.
"""

import functools
import itertools
import math
from dataclasses import dataclass

import pytest
import sequence_models
import torch
from contestants import CONTESTANTS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from workloads import Workload

from spectral_dp.gradients import norms
from spectral_dp.gradients.rules import conv_norms, registry
from spectral_dp.gradients.rules.block_circulant import BlockCirculantRule
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.gradients.rules.fallback import FallbackRule

BATCH = 64


@dataclass(frozen=True)
class Limits:
    """Ratios to a plain step of the dense model: multiplications, numbers written, and the largest tensor."""

    model: str
    block_size: int | None
    flops: float
    numbers: float
    largest: float

    def workload(self, batch_size=BATCH):
        return Workload(self.model, batch_size, self.block_size, width=64)


LIMITS = {
    "model1": Limits("model1", None, 1.15, 6.9, 1.0),  # of its numbers, five in six are noise and its making
    "model1 blocks": Limits("model1", 8, 0.3, 1.7, 0.3),
    "lenet5": Limits("lenet5", None, 1.1, 2.2, 1.0),
    # Of their numbers, half are taps and filtered inputs, a few samples at a time, which stay in the cache.
    "model2": Limits("model2", None, 1.1, 3.4, 1.0),
    "model3": Limits("model3", None, 1.1, 5.8, 1.25),
    "transformer blocks": Limits("transformer", 8, 0.95, 2.4, 1.0),
}


class Tally(TorchDispatchMode):
    """Counts the numbers that operations write, views apart."""

    def __init__(self):
        super().__init__()
        self.operations, self.numbers, self.largest = 0, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        sizes = [] if func.is_view else [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numbers += sum(sizes)
        self.largest = max(self.largest, *sizes, 0)
        return out


def cost(contestant, work):
    """Multiplications (as torch counts them, twice), numbers written and largest tensor of one step."""
    step = CONTESTANTS[contestant](work)
    step()  # what is made once, such as a basis, is not part of a step
    with FlopCounterMode(display=False) as arithmetic, Tally() as tally:
        step()
    return arithmetic.get_total_flops(), tally.numbers, tally.largest


@functools.cache
def plain_cost(work):
    """Of a step without privacy, which no control changes."""
    return cost("plain", work)


def check(name, contestant="spectral", batch_size=BATCH):
    limits = LIMITS[name]
    work = limits.workload(batch_size)
    ours, plain = cost(contestant, work), plain_cost(work)
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    for what, ratio in zip(("flops", "numbers", "largest"), ratios, strict=True):
        assert ratio <= getattr(limits, what), f"{what} over plain: {ratio:.2f}"


@pytest.mark.parametrize("contestant", ["spectral", "dpsgd", "spectral, per layer"])
@pytest.mark.parametrize("name", LIMITS)
def test_a_private_step_costs_about_as_much_as_a_plain_one(name, contestant):
    check(name, contestant)


def check_that_what_is_dropped_is_not_computed(name):
    work = LIMITS[name].workload()
    assert cost("spectral", work)[0] < plain_cost(work)[0], "flops over plain"


@pytest.mark.parametrize("name", ["model2", "model3"])
def test_with_half_of_the_coefficients_a_private_step_multiplies_less_than_a_plain_one(name):
    """Norms and clipped sums together, because the products of what a filter drops are never computed."""
    check_that_what_is_dropped_is_not_computed(name)


#: Models of sequences at full width, where Gram matrices are cheaper than gradients: multiplications and numbers
#: written, over plain. They have one layer: further ones cost the same. Torch does not count the multiplications of its
#: LSTM.
SEQUENCES = {
    "bert": (1.22, 3.55),  # Gram matrices in pieces of 128, which no record can exploit, not 256
    "torch encoder": (1.28, 2.1),
    "lstm": (math.inf, 3.0),
    "bert, lora": (1.02, 1.2),
    "bert, biases": (1.01, 1.65),
    "bert, head": (1.01, 1.02),
}


@pytest.fixture(autouse=True)
def _one_layer(monkeypatch):
    monkeypatch.setattr(sequence_models, "LAYERS", 1)


def check_sequences(model):
    limits, work = SEQUENCES[model], Workload(model, 8)
    ratios = [a / b for a, b in zip(cost("dpsgd", work), plain_cost(work), strict=True)]
    for what, ratio, limit in zip(("flops", "numbers", "largest"), ratios, (*limits, 1.0), strict=True):
        assert ratio <= limit, f"{what} over plain: {ratio:.2f}"


@pytest.mark.parametrize("model", SEQUENCES)
def test_a_private_step_on_sequences_costs_about_as_much_as_a_plain_one(model):
    """What is frozen costs nothing: with the head alone, no more numbers are written than by plain training."""
    check_sequences(model)


def check_that_small_batches_take_few_operations():
    """Each operation takes some microseconds, whatever the batch: they are what a step on a few samples costs."""
    counts = {}
    for contestant in ("plain", "spectral"):
        step = CONTESTANTS[contestant](Workload("lenet5", 8))
        step()
        with Tally() as tally:
            step()
        counts[contestant] = tally.operations
    assert counts["spectral"] - counts["plain"] <= 500


def test_small_batches_take_few_operations():
    check_that_small_batches_take_few_operations()


def is_linear(costs):
    """Whether the cost of a batch, and of twice and four times as large a one, grows by the same for every sample."""
    first, second = (b - a for a, b in itertools.pairwise(costs))
    return second <= 2.1 * first


@pytest.mark.parametrize("name", LIMITS)
def test_cost_grows_no_faster_than_the_batch(name):
    """Counted without the fixed part, which would hide a square behind it."""
    flops, numbers, _ = zip(*(cost("spectral", LIMITS[name].workload(b)) for b in (8, 16, 32)), strict=True)
    assert is_linear(flops)
    assert is_linear(numbers)


def test_control_a_square_is_not_linear():
    assert is_linear([1000 + 10 * b for b in (8, 16, 32)])
    assert not is_linear([1000 + 10 * b + b**2 / 10 for b in (8, 16, 32)])


class TestControls:
    """Each is a way back to something slow, and must not pass."""

    def test_lengths_of_a_few_samples_at_a_time(self, monkeypatch):
        monkeypatch.setattr("spectral_dp.gradients.sums.CHUNK_BYTES", 0)
        with pytest.raises(AssertionError):
            check_that_small_batches_take_few_operations()

    @pytest.mark.parametrize("name", ["lenet5", "model2", "model3"])
    def test_gram_matrices_of_large_maps(self, name, monkeypatch):
        """Of a small batch: the multiplications of a sample are the same in any, and within the limit as it is."""
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: False)
        with pytest.raises(AssertionError, match="flops over plain"):
            check(name, batch_size=8)

    def test_per_sample_gradients_of_many_channels(self, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: True)
        with pytest.raises(AssertionError, match="over plain"):
            check("model3")

    @pytest.mark.parametrize("name", ["model2", "model3"])
    def test_products_that_are_dropped_afterwards(self, name, monkeypatch):
        monkeypatch.setattr(conv_norms, "filters_first", lambda *_: False)
        with pytest.raises(AssertionError, match="flops over plain"):
            check_that_what_is_dropped_is_not_computed(name)

    def test_gram_matrices_of_many_tokens(self, monkeypatch):
        monkeypatch.setattr(BlockCirculantRule, "forms", lambda *_: False)
        with pytest.raises(AssertionError, match="numbers over plain"):
            check("transformer blocks", "dpsgd")

    @pytest.mark.parametrize("model", ["bert", "torch encoder"])
    def test_both_halves_of_gram_matrices(self, model, monkeypatch):
        def whole(x, dA):
            P, Q = norms.gram_matrices(x), norms.gram_matrices(dA)
            return (P * Q).sum((1, 2)), *(gram.diagonal(dim1=1, dim2=2).sqrt() for gram in (P, Q))

        monkeypatch.setattr(norms, "_gram_norms", whole)
        with pytest.raises(AssertionError, match="flops over plain"):
            check_sequences(model)

    @pytest.mark.filterwarnings("ignore:no rule for")
    @pytest.mark.parametrize("name", ["model1", "lenet5", "model2"])
    def test_the_general_fallback(self, name, monkeypatch):
        for kind in (nn.Linear, nn.Conv2d):
            monkeypatch.setitem(registry._RULES, kind, FallbackRule)
        with pytest.raises(AssertionError, match="flops over plain"):
            check(name, "dpsgd", batch_size=8)
