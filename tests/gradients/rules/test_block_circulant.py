"""Algorithm 3: rank-one norms and clipped sums of block-circulant layers against a loop over samples."""

import pytest
import torch
from tests.support.oracle import coordinates, norm_of, relative_error, sample_gradients
from tests.support.uses import clipped_sums, squared_norms
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.gradients import sums as weighted_sums
from spectral_dp.gradients.rules import block_circulant
from spectral_dp.gradients.rules.block_circulant import BlockCirculantRule
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.gradients.uses import condense
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.clipping import clip_factors
from spectral_dp.mechanism.filters import (
    AdaptiveFilter,
    AnnealedFilter,
    Filter,
    IdentityFilter,
    LowPassFilter,
    PaperBandFilter,
    ShapedFilter,
)
from spectral_dp.mechanism.gains import Gains
from spectral_dp.mechanism.transforms import get_transform

TOLERANCE = 1e-9
BLOCKS = [1, 2, 3, 7, 8, 10, 16]
FILTERS = [
    IdentityFilter(),
    LowPassFilter(0.0),
    LowPassFilter(0.3),
    LowPassFilter(0.5),
    LowPassFilter(0.9),
    LowPassFilter(0.5, order="clip_then_filter"),
    PaperBandFilter(0.5),
    PaperBandFilter(0.75, order="clip_then_filter"),
    AnnealedFilter(0.7, 0.0, 10),
]


@pytest.fixture(params=["matrix", "fft", "formed"])
def path(request, monkeypatch):
    """Short blocks, long blocks and many tokens are computed differently; a wrong choice must never change a value."""
    monkeypatch.setattr(block_circulant, "SHORT_BLOCK", 0 if request.param == "fft" else 10**6)
    monkeypatch.setattr(BlockCirculantRule, "forms", lambda *_: request.param == "formed")
    monkeypatch.setattr(weighted_sums, "CHUNK_BYTES", 1)  # two samples at a time


def setting(layer, B, tokens=()):
    x = torch.randn(B, *tokens, layer.in_features, dtype=torch.float64)
    dA = torch.randn(B, *tokens, layer.out_features, dtype=torch.float64)
    return x, dA, torch.rand(B, dtype=torch.float64)


def layer_of(n, m, d, bias=True):
    return BlockCirculantLinear(n, m, d, bias, dtype=torch.float64)


def check(layer, spectral, x, dA, c):
    """Everything a rule gives, against plain autograd on one sample at a time and the basis matrix."""
    rule = BlockCirculantRule(layer, spectral)
    kept = sample_gradients(layer, (x,), dA)
    counted = dict(kept)
    if "weight" in kept and rule.gains is not None:
        shape = (layer.block_size,)
        kept["weight"], counted["weight"] = coordinates(kept["weight"], shape, spectral, "fourier")
    assert relative_error(squared_norms(rule, x, dA), norm_of(counted)) < TOLERANCE
    sums = clipped_sums(rule, x, dA, c)
    assert sums.keys() == kept.keys()
    for name, z in kept.items():
        expected = torch.tensordot(c, z, dims=1)
        assert tuple(sums[name].shape) == rule.coefficient_shape(name) == tuple(expected.shape)
        assert relative_error(sums[name], expected) < TOLERANCE
    per_sample = rule.form(x, dA)
    assert per_sample.keys() == kept.keys()
    for name in per_sample:  # with or without coordinates that are always zero
        assert relative_error(per_sample[name].flatten(1).norm(dim=1), counted[name].flatten(1).norm(dim=1)) < TOLERANCE
        if per_sample[name].shape == counted[name].shape:
            assert relative_error(per_sample[name], counted[name]) < TOLERANCE


@pytest.mark.parametrize("filter", FILTERS, ids=repr)
@pytest.mark.parametrize("d", BLOCKS)
def test_one_token(path, d, filter):
    """Catches a wrong weight of DC or Nyquist, odd and even d mixed up, a sign of the sine, a lost √d."""
    layer = layer_of(2 * d, 3 * d, d)
    check(layer, LayerConfig(filter), *setting(layer, 5))


@pytest.mark.parametrize(
    "filter", [IdentityFilter(), LowPassFilter(0.5), LowPassFilter(0.5, order="clip_then_filter")], ids=repr
)
@pytest.mark.parametrize("tokens", [(4,), (2, 3), (40,), (1,)], ids=str)
@pytest.mark.parametrize("d", [1, 2, 3, 8])
def test_tokens_are_summed_before_the_norm(path, d, tokens, filter):
    """The sum of the tokens' norms is another number. Few tokens go through Gram matrices, many do not."""
    layer = layer_of(9 * d - (d > 1), 10 * d - (d > 2), d)
    check(layer, LayerConfig(filter), *setting(layer, 3, tokens))


@pytest.mark.parametrize(("n", "m", "d"), [(21, 14, 8), (23, 17, 7), (30, 4, 10), (4, 30, 16), (5, 33, 3), (1, 9, 9)])
def test_sizes_need_not_be_multiples_of_the_block(path, n, m, d):
    layer = layer_of(n, m, d)
    for filter in (LowPassFilter(0.0), LowPassFilter(0.4)):
        check(layer, LayerConfig(filter), *setting(layer, 4))
        check(layer, LayerConfig(filter), *setting(layer, 4, (3,)))


@pytest.mark.parametrize("order", ["same", "only post"])
@pytest.mark.parametrize("d", [3, 8])
def test_shaped_gains(path, d, order):
    """Pre-gains count in norm and sum; a sine dropped by its post-gain alone still counts in the norm."""
    f = (torch.arange(d) + 1) // 2
    pre = 1.0 / (1 + f)
    post = None
    if order == "only post":
        post = torch.rand(d)
        post[2] = 0
    layer = layer_of(2 * d + 1, 3 * d - 1, d)
    check(layer, LayerConfig(ShapedFilter(pre, post)), *setting(layer, 4))
    check(layer, LayerConfig(ShapedFilter(pre, post)), *setting(layer, 4, (3,)))


def test_a_frequency_may_be_dropped_by_its_pre_gain(path):
    pre = torch.tensor([1.0, 0, 0, 2, 2, 1, 1, 0])
    layer = layer_of(16, 24, 8)
    check(layer, LayerConfig(ShapedFilter(pre)), *setting(layer, 4))


@pytest.mark.parametrize(
    ("bias", "frozen"), [(False, ()), (True, ("weight",)), (True, ("bias",)), (False, ("weight",))]
)
def test_only_what_is_trained_counts(path, bias, frozen):
    layer = layer_of(16, 24, 8, bias)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x, dA, c = setting(layer, 4, (2,))
    if any(p.requires_grad for p in layer.parameters()):
        return check(layer, LayerConfig(LowPassFilter(0.5)), x, dA, c)
    rule = BlockCirculantRule(layer, LayerConfig(LowPassFilter(0.5)))
    assert clipped_sums(rule, x, dA, c) == rule.form(x, dA) == {}
    assert torch.equal(squared_norms(rule, x, dA), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize("tokens", [(), (3,)], ids=str)
def test_batches_of_one_and_of_none(path, tokens):
    layer = layer_of(16, 24, 8)
    check(layer, LayerConfig(LowPassFilter(0.5)), *setting(layer, 1, tokens))
    rule = BlockCirculantRule(layer, LayerConfig(LowPassFilter(0.5)))
    x, dA, c = setting(layer, 0, tokens)
    assert squared_norms(rule, x, dA).shape == (0,)
    sums = clipped_sums(rule, x, dA, c)
    assert torch.equal(sums["weight"], torch.zeros_like(sums["weight"]))
    assert tuple(sums["weight"].shape) == rule.coefficient_shape("weight")
    assert torch.equal(sums["bias"], torch.zeros(24, dtype=torch.float64))
    assert len(rule.form(x, dA)["weight"]) == 0


@pytest.mark.parametrize(
    "filter", [IdentityFilter(), LowPassFilter(0.5), PaperBandFilter(0.5), AdaptiveFilter(0.2)], ids=repr
)
@pytest.mark.parametrize("d", [1, 7, 8])
def test_the_gradient_is_the_filtered_gradient(path, d, filter):
    """With c = 1 and no noise, what comes out is the plain gradient projected to the kept frequencies."""
    layer = layer_of(2 * d + 1, 3 * d - 1, d)
    rule = BlockCirculantRule(layer, LayerConfig(filter))
    x, dA, _ = setting(layer, 6)
    sums = clipped_sums(rule, x, dA, torch.ones(6))
    (layer(x) * dA).sum().backward()
    z = rule.transform.forward(layer.weight.grad)
    mask = 1.0 if rule.gains is None else rule.gains.kept.double()
    torch.testing.assert_close(rule.gradient("weight", sums["weight"]), rule.transform.inverse(z * mask))
    torch.testing.assert_close(rule.gradient("bias", sums["bias"]), layer.bias.grad)


def hostile_samples(layer, T):
    """Samples made to break a clip: (name, x, dA), each (1, T, n)."""
    n, m, d, dtype = layer.in_features, layer.out_features, layer.block_size, layer.weight.dtype

    def random(n):
        return torch.randn(1, T, n, dtype=dtype)

    def highest(n):
        """Power in the last coordinate of every block only."""
        return (random(n // d)[..., None] * get_transform("fourier").basis(d, dtype=dtype)[-1]).flatten(-2)

    signs = (1 - 2 * (torch.arange(T) // (T // 2 or 1) % 2)).to(dtype).view(1, T, 1)  # half of them each
    same, one = random(n)[:, :1], random(m)[:, :1]
    yield "huge", random(n) * 1e6, random(m) * 1e3
    yield "zeros", torch.zeros_like(random(n)), random(m)
    yield "no gradient", random(n), torch.zeros_like(random(m))
    yield "constant", torch.ones_like(random(n)), torch.ones_like(random(m))
    yield "power in dropped frequencies", highest(n) * 1e7, highest(m) * 1e7
    yield "power of the input in dropped frequencies", highest(n) * 1e7, random(m)
    yield "cancelling tokens", same.expand(1, T, n) * 1e6, one * signs
    yield "nearly cancelling tokens", same + 1e-5 * random(n), one * signs * 1e6
    yield "tokens that add up", same.expand(1, T, n), one.expand(1, T, m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("T", [1, 4, 64, 4000])
@pytest.mark.parametrize(
    "filter", [IdentityFilter(), LowPassFilter(0.5), LowPassFilter(0.5, order="clip_then_filter")], ids=repr
)
@pytest.mark.parametrize("d", [1, 2, 7, 8])
def test_no_sample_contributes_more_than_the_bound(path, d, filter, T, dtype):
    """The neighbour check: whatever a record is, adding it moves the sums by at most C.

    In float32 norm and sum of some of these are rounding errors, and not the same ones: a norm that is merely exact
    "to rounding" lets such a record through at several times the bound.
    """
    C = 0.5
    layer = BlockCirculantLinear(6 * d, 5 * d, d, dtype=dtype)
    rule = BlockCirculantRule(layer, LayerConfig(filter))
    for name, x, dA in hostile_samples(layer, T):
        c = clip_factors(squared_norms(rule, x, dA).double().sqrt(), C)
        moved = clipped_sums(rule, x, dA, c)
        assert float(torch.stack([z.double().square().sum() for z in moved.values()]).sum().sqrt()) <= C, name


def test_control_a_sum_of_other_numbers_than_the_norm_is_caught(monkeypatch):
    """Formed gradients need no allowance for rounding only because norm and sum are made of the same ones."""
    answers = iter([True, False] * 1000)
    monkeypatch.setattr(BlockCirculantRule, "forms", lambda *_: next(answers))

    def some_draws():
        for seed in range(20):
            torch.manual_seed(seed)
            test_no_sample_contributes_more_than_the_bound(None, 2, LowPassFilter(0.5), 4000, torch.float32)

    with pytest.raises(AssertionError, match="tokens"):
        some_draws()


class Allocations(TorchDispatchMode):
    """Records the elements of every tensor that an operation returns, views apart."""

    def __init__(self):
        super().__init__()
        self.sizes, self.products = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += out.numel() if func.overloadpacket.__name__ == "bmm" else 0
        if not func.is_view:
            self.sizes += [t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if torch.is_tensor(t)]
        return out


def allocations(rule, x, dA, c):
    with torch.no_grad(), Allocations() as seen:
        use = condense(rule, x, dA)
        use.squared_norms()
        use.clipped_sums(c)
    return seen


@pytest.mark.parametrize("short_block", [0, 10**6], ids=["fft", "matrix"])
@pytest.mark.parametrize("tokens", [(), (4,)], ids=str)
def test_no_per_sample_gradient_is_stored(monkeypatch, tokens, short_block):
    """A per-sample gradient would be B x parameters; what is needed is B x (inputs + outputs)."""
    monkeypatch.setattr(block_circulant, "SHORT_BLOCK", short_block)
    B, n, m, d = 64, 128, 256, 4
    layer = layer_of(n, m, d)
    x, dA, c = setting(layer, B, tokens)
    seen = allocations(BlockCirculantRule(layer, LayerConfig(LowPassFilter(0.0))), x, dA, c)
    assert max(seen.sizes) < B * layer.weight.numel() / 4
    assert max(seen.sizes) <= max(2 * dA.numel(), 2 * layer.weight.numel())


def test_views_of_one_token_are_condensed_together(monkeypatch):
    """One use of eight tokens: formed once, since norm and sum must be of the same numbers."""
    layer = layer_of(16, 16, 4)
    formed = []
    form = BlockCirculantRule.form
    monkeypatch.setattr(BlockCirculantRule, "form", lambda *args: formed.append(1) or form(*args))
    gradients = ModelGradients(layer)
    layer(torch.randn(16, 16, dtype=torch.float64)).square().sum().backward()
    batch = gradients.take(views=8)
    batch.clipped_sums(batch.squared_norms().sum(0))
    gradients.remove()
    assert len(formed) == 1


def test_many_tokens_make_the_gradients_smaller_than_themselves():
    """Then they are formed, once: one product for every chunk of samples, and nothing larger than the tokens."""
    layer = layer_of(64, 64, 8)
    x, dA, c = setting(layer, 64, (64,))
    rule = BlockCirculantRule(layer, LayerConfig(LowPassFilter(0.0)))
    assert rule.forms(x, dA)
    assert not rule.forms(x[:, :1], dA[:, :1])
    seen = allocations(rule, x, dA, c)
    assert max(seen.sizes) <= 2 * dA.numel()
    transforms, outer, combined = 11 * 2 * dA.numel() / 8, 11 * 64 * layer.weight.numel() / 8, 64 * layer.weight.numel()
    assert seen.products == transforms + outer + combined


def test_dropped_frequencies_cost_nothing():
    """Of 16 coordinates 3 are kept: 4 products instead of 23. In the paper's order the norm still needs them all."""
    layer = layer_of(256, 256, 16)
    filters = LowPassFilter(0.0), LowPassFilter(0.75), LowPassFilter(0.75, order="clip_then_filter")
    x, dA, c = setting(layer, 64)
    everything, some, more = (
        allocations(BlockCirculantRule(layer, LayerConfig(f)), x, dA, c).products for f in filters
    )
    assert some < everything / 5
    assert some < more < everything


def test_frozen_parameters_cost_nothing():
    layer = layer_of(32, 32, 8)
    layer.weight.requires_grad_(False)
    seen = allocations(BlockCirculantRule(layer, LayerConfig(LowPassFilter(0.5))), *setting(layer, 4))
    assert seen.products == 0
    assert max(seen.sizes) <= 4 * 32


def test_activations_of_autocast_are_computed_in_the_precision_of_the_weight(path):
    layer = BlockCirculantLinear(16, 24, 8)
    rule = BlockCirculantRule(layer, LayerConfig(LowPassFilter(0.5)))
    x, dA, c = torch.randn(4, 16).bfloat16(), torch.randn(4, 24).bfloat16(), torch.rand(4, dtype=torch.float64)
    norms, sums = squared_norms(rule, x, dA), clipped_sums(rule, x, dA, c)
    assert sums["weight"].dtype == sums["bias"].dtype == torch.float32
    assert norms.dtype in (torch.float32, torch.float64)
    torch.testing.assert_close(norms, squared_norms(rule, x.float(), dA.float()))


def test_gains_follow_the_step(path):
    """Frequencies chosen once and for all would release the wrong ones under a schedule."""
    layer = layer_of(16, 24, 8)
    rule = BlockCirculantRule(layer, LayerConfig(AnnealedFilter(0.8, 0.0, 10)))
    x, dA, c = setting(layer, 4)
    few, norms = clipped_sums(rule, x, dA, c)["weight"], squared_norms(rule, x, dA)
    rule.begin_step(10)
    everything = clipped_sums(rule, x, dA, c)["weight"]
    assert (few.shape[-1], everything.shape[-1]) == (1, 8)
    torch.testing.assert_close(everything[..., :1], few)
    assert bool((squared_norms(rule, x, dA) > norms).all())


def test_a_layer_used_twice_adds_its_gradients_before_the_norm():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer_of(12, 12, 4)

        def forward(self, x):
            return self.layer(self.layer(x).tanh())

    model, x = Twice(), torch.randn(3, 12, dtype=torch.float64)
    expected = norm_of(sample_gradients(model, (x,), torch.ones_like(x)))
    gradients = ModelGradients(model)
    model(x).sum().backward()
    torch.testing.assert_close(gradients.take().squared_norms()[0], expected)


def test_is_registered():
    assert find_rule(BlockCirculantLinear(8, 8, 4)) is BlockCirculantRule


@pytest.mark.parametrize("transform", ["dct", "haar", "identity"])
def test_other_transforms_are_refused(transform):
    """Only in Fourier space is the gradient rank one per frequency: norms would be wrong, not slow."""
    with pytest.raises(ValueError, match=f"Fourier.*'{transform}'"):
        BlockCirculantRule(layer_of(8, 8, 4), LayerConfig(LowPassFilter(0.5), transform=transform))


class FromStepFive(Filter):
    """Gains that are refused from the fifth step on, always the same object."""

    good = Gains(torch.ones(8).double(), torch.ones(8).double())
    bad = Gains(torch.tensor([1.0, 10, 20, 1, 1, 1, 1, 1]).double(), torch.ones(8).double())

    def gains(self, transform, shape, step=0):
        return self.good if step < 5 else self.bad


def test_gains_that_were_refused_once_are_refused_again():
    """Else norms would be of the old gains and sums of the new ones, which are up to twenty times as large."""
    rule = BlockCirculantRule(layer_of(16, 16, 8), LayerConfig(FromStepFive()))
    for _ in range(2):
        with pytest.raises(ValueError, match="average each pair"):
            rule.begin_step(5)


def test_gains_of_a_filter_are_its_own():
    """Changed from outside, they would differ from what was made of them."""
    pre = torch.ones(8, dtype=torch.float64)
    layer = layer_of(16, 16, 8)
    rule = BlockCirculantRule(layer, LayerConfig(ShapedFilter(pre, pre)))
    x, dA, c = setting(layer, 4)
    before = squared_norms(rule, x, dA), clipped_sums(rule, x, dA, c)["weight"]
    pre.mul_(10)
    rule.begin_step(1)
    torch.testing.assert_close((squared_norms(rule, x, dA), clipped_sums(rule, x, dA, c)["weight"]), before)


def test_pre_gains_that_split_a_frequency_are_refused():
    pre = torch.ones(8)
    pre[4] = 0.5
    with pytest.raises(ValueError, match=r"per frequency.*0\.5.*average each pair"):
        BlockCirculantRule(layer_of(8, 8, 8), LayerConfig(ShapedFilter(pre)))
