"""Check B of the privacy proof, through the real path: no sample, however hostile, moves the sums beyond the bound."""

import math

import pytest
import torch
from tests.support.contributions import C, contribution, worst_of_products
from tests.support.recorded_models import Reused
from tests.support.uses import clipped_sums, squared_norms
from torch import nn

from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.gradients import norms as norms_module
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.clipping import clip_factors
from spectral_dp.mechanism.filters import LowPassFilter, PaperBandFilter


def hostile_images():
    x = torch.randn(2, 6, 6)
    one_nan, one_inf = x.clone(), x.clone()
    one_nan[0, 3, 3] = math.nan
    one_inf[1, 0, 0] = math.inf
    stripes = torch.ones_like(x) * 1e4
    stripes[..., ::2] *= -1
    return [x, x * 1e6, x * 1e18, x * 1e30, torch.zeros_like(x), torch.ones_like(x) * 1e6, stripes, one_nan, one_inf]


def clipped_release(model, gradients, x):
    """The clipped sums of a batch, all coefficients in one vector; samples that are not finite count as zero."""
    model(x).square().sum().backward()
    batch = gradients.take()
    c = clip_factors(batch.squared_norms().sum(0).sqrt(), C)
    return torch.cat([v.double().flatten() for v in batch.clipped_sums(c).values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("uses_gram", [True, False], ids=["gram", "materialise"])
@pytest.mark.parametrize(
    "spectral",
    [
        LayerConfig(),
        LayerConfig(LowPassFilter(0.5)),
        LayerConfig(LowPassFilter(0.5, order="clip_then_filter")),
        LayerConfig(PaperBandFilter(0.5), support="signal"),
    ],
    ids=["plain", "filtered", "paper's order", "signal support"],
)
def test_no_sample_moves_the_sums_further_than_the_bound(spectral, uses_gram, dtype, monkeypatch):
    monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(3, 3, 3, stride=2, groups=3), nn.Flatten(), nn.Linear(12, 3),
    ).to(dtype)  # fmt: skip
    gradients = ModelGradients(model, {"0": spectral, "2": spectral})
    worst = 0.0
    for size in (1, 3):
        batch = torch.randn(size, 2, 6, 6, dtype=dtype)
        before = clipped_release(model, gradients, batch)
        for record in hostile_images():
            after = clipped_release(model, gradients, torch.cat([batch, record[None].to(dtype)]))
            assert bool(after.isfinite().all()), "a hostile sample made the release non-finite"
            worst = max(worst, float((after - before).norm()))
    gradients.remove()
    assert 0.5 * C < worst <= C * (1 + 1e-5)


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 6), lambda: Reused(nn.Linear(6, 6)), lambda: nn.LayerNorm(6)])
def test_long_sequences_and_reused_layers_are_bounded_too(make):
    model = make()
    gradients = ModelGradients(model)
    tokens = torch.randn(1, 200, 6)
    cancelling = torch.cat([tokens, -tokens], dim=1) * 1e3
    base = torch.randn(2, 400, 6)
    before = clipped_release(model, gradients, base)
    for record in (torch.randn(1, 400, 6) * 1e6, cancelling, torch.ones(1, 400, 6) * 1e4):
        after = clipped_release(model, gradients, torch.cat([base, record]))
        assert float((after - before).norm()) <= C * (1 + 1e-5)
    gradients.remove()


def test_control_token_norms_added_up_would_be_caught(monkeypatch):
    """The neighbour check has power: the sum of the tokens' norms is not a bound on the norm of their sum."""
    from spectral_dp.gradients.rules import linear

    monkeypatch.setattr(linear, "token_norms", lambda x, dA, _: (x.square().sum(2) * dA.square().sum(2)).sum(1))
    model = nn.Linear(6, 6)
    gradients = ModelGradients(model)
    base = torch.zeros(1, 400, 6)
    before = clipped_release(model, gradients, base)
    after = clipped_release(model, gradients, torch.cat([base, torch.ones(1, 400, 6) * 1e4]))
    gradients.remove()
    assert float((after - before).norm()) > 5 * C


def hostile_tokens(tokens, n, m):
    """Samples made to break a clip, ``x (1, T, n)`` and ``dA (1, T, m)``: what cancels leaves only rounding errors."""
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(max(tokens // 2, 1)).repeat(2)[:tokens].view(1, tokens, 1)
    same, one = torch.randn(1, 1, n), torch.randn(1, 1, m)
    yield torch.randn(1, tokens, n) * 1e6, torch.randn(1, tokens, m) * 1e3
    yield torch.zeros(1, tokens, n), torch.randn(1, tokens, m)
    yield same.expand(1, tokens, n) * 1e6, one * signs
    yield same + 1e-5 * torch.randn(1, tokens, n), one * signs * 1e6
    yield same.expand(1, tokens, n), one.expand(1, tokens, m)


@pytest.mark.parametrize("tokens", [1, 2, 4, 64, 4000])
@pytest.mark.parametrize(("n", "m"), [(6, 5), (200, 300)])
def test_cancelling_tokens_are_bounded_in_float32(tokens, n, m):
    """Norm and sum of such a sample are rounding errors, and not the same ones: unguarded, it counts up to 4 C."""
    rule = find_rule(nn.Linear(n, m))(nn.Linear(n, m), LayerConfig())
    for seed in range(3):
        torch.manual_seed(seed)
        for x, dA in hostile_tokens(tokens, n, m):
            assert contribution(rule, x, dA) <= C


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 400), lambda: BlockCirculantLinear(4, 400, 4)])
def test_squares_that_underflow_do_not_hide_a_sample(make, tokens):
    """An enormous input, a vanishing output gradient: their product is large, the square of the small one is zero."""
    module = make()
    rule = find_rule(module)(module, LayerConfig())
    for small in (1e-18, 1e-19, 2e-20, 1e-22):
        x, dA = torch.full((1, tokens, 4), 1e18), torch.full((1, tokens, 400), small)
        moved = {name: value * 1000 for name, value in clipped_sums(rule, x, dA, clipped_for_mean(rule, x, dA)).items()}
        assert float(torch.stack([z.double().square().sum() for z in moved.values()]).sum().sqrt()) <= C


def clipped_for_mean(rule, x, dA, batch=1000):
    """Factors as for a mean over a thousand samples, which is undone after the norm has been taken."""
    return clip_factors((squared_norms(rule, x, dA).double() * batch**2).sqrt(), C)


PRODUCTS = [
    pytest.param(lambda: nn.Linear(4, 400), (4,), (400,), LayerConfig(), id="dense"),
    pytest.param(lambda: nn.Linear(4, 400), (3, 4), (3, 400), LayerConfig(), id="tokens"),
    pytest.param(lambda: nn.Linear(64, 400), (3, 64), (3, 400), LayerConfig(), id="tokens, gram"),
    pytest.param(
        lambda: nn.Linear(16, 40),
        (16,),
        (40,),
        LayerConfig(LowPassFilter(0.5), input_layout=(4, 4)),
        id="with a layout",
    ),
    pytest.param(lambda: BlockCirculantLinear(8, 400, 4), (8,), (400,), LayerConfig(LowPassFilter(0.5)), id="blocks"),
    pytest.param(lambda: BlockCirculantLinear(8, 400, 4), (3, 8), (3, 400), LayerConfig(), id="blocks, tokens"),
    pytest.param(lambda: nn.Conv2d(2, 40, 3), (2, 5, 5), (40, 3, 3), LayerConfig(), id="kernel"),
    pytest.param(
        lambda: nn.Conv2d(2, 40, 3), (2, 5, 5), (40, 3, 3), LayerConfig(LowPassFilter(0.5)), id="kernel, filtered"
    ),
    pytest.param(lambda: nn.Conv2d(2, 40, 3), (2, 5, 5), (40, 3, 3), LayerConfig(support="signal"), id="signal"),
    pytest.param(
        lambda: nn.Conv2d(2, 40, 3),
        (2, 5, 5),
        (40, 3, 3),
        LayerConfig(PaperBandFilter(0.5), support="signal"),
        id="paper's band",
    ),
    pytest.param(
        lambda: nn.Conv2d(2, 40, 3, groups=2),
        (2, 5, 5),
        (40, 3, 3),
        LayerConfig(PaperBandFilter(0.5, order="clip_then_filter"), support="signal"),
        id="paper's order, groups",
    ),
    pytest.param(lambda: nn.LayerNorm(400), (400,), (400,), LayerConfig(), id="normalisation"),
]


@pytest.mark.parametrize("uses_gram", [True, False], ids=["gram", "materialise"])
@pytest.mark.parametrize(("make", "x_shape", "dA_shape", "spectral"), PRODUCTS)
def test_underflow_hides_no_product_of_any_rule(make, x_shape, dA_shape, spectral, uses_gram, monkeypatch):
    """Squares of the small factor are zero, its product with the large one is not: unguarded, up to millions of C."""
    monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
    module = make()
    assert worst_of_products(find_rule(module)(module, spectral), x_shape, dA_shape) <= 1


@pytest.mark.parametrize("bound", [1e-5, 1e-8])
@pytest.mark.parametrize("support", ["kernel", "signal"])
def test_underflow_through_a_normalisation(support, bound):
    """An enormous image: normalisation divides the gradient by its size, and the layer before multiplies it back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, bias=False), nn.GroupNorm(2, 8, affine=False), nn.Flatten(), nn.Tanh())
    gradients = ModelGradients(model, {"0": LayerConfig(LowPassFilter(0.3), support=support)})
    image = torch.randn(1, 2, 6, 6)
    for size in (1.0, 1e6, 1e12, 1e15, 1e17):
        (model(image * size).sum() * 1e-3).backward()
        batch = gradients.take()
        (sums,) = batch.clipped_sums(clip_factors(batch.squared_norms().sum(0).sqrt(), bound)).values()
        assert float(sums.double().norm()) <= bound
    gradients.remove()


def underflowing_biases(model, x_shape, bound):
    """Of a bias there is no product; at bounds this small its own squares underflow."""
    gradients = ModelGradients(model)
    worst = 0.0
    for small in (1e-20, 1e-22, 1e-23, 1e-24):
        out = model(torch.zeros(1, *x_shape))
        (out * small).sum().backward()
        batch = gradients.take()
        sums = batch.clipped_sums(clip_factors(batch.squared_norms().sum(0).sqrt(), bound))
        worst = max(worst, float(torch.stack([z.double().square().sum() for z in sums.values()]).sum().sqrt()) / bound)
    gradients.remove()
    return worst


BIASES = [
    pytest.param(lambda: nn.Linear(2, 1000), (2,), id="dense"),
    pytest.param(lambda: nn.Conv1d(2, 1000, 1), (2, 1), id="convolution"),
    pytest.param(lambda: BlockCirculantLinear(8, 1000, 8), (8,), id="blocks"),
    pytest.param(lambda: nn.GroupNorm(1, 1000), (1000, 1), id="normalisation"),
    pytest.param(lambda: Shift(1000), (1000,), id="fallback"),
    pytest.param(lambda: nn.Sequential(*[Shift(1000)] * 2), (1000,), id="two uses"),
]


class Shift(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        return x + self.bias


@pytest.mark.filterwarnings("ignore:no rule for")
@pytest.mark.parametrize(("make", "x_shape"), BIASES)
def test_underflow_hides_no_bias(make, x_shape):
    assert underflowing_biases(make(), x_shape, bound=1e-23) <= 1


@pytest.mark.filterwarnings("ignore:no rule for")
@pytest.mark.parametrize(("make", "x_shape"), BIASES)
def test_control_plain_squares_hide_them(make, x_shape, monkeypatch):
    for name in ("mechanism.clipping", "gradients.norms", "gradients.rules.block_circulant"):
        monkeypatch.setattr(f"spectral_dp.{name}.underflow", lambda *_: 0.0)
    assert underflowing_biases(make(), x_shape, bound=1e-23) > 2


def test_weights_below_the_smallest_number_are_not_rounded_up():
    """1e-45 is no float32, and the next one is 1.4 times as large: so would be the sample's contribution."""
    layer = nn.Linear(1, 1, bias=False)
    gradients = ModelGradients(nn.Sequential(layer, layer))  # two uses: the norm is taken in float64
    with torch.no_grad():
        layer.weight.fill_(1.0)
    moved = []
    for size in (1e37, 1.1e37, 0.8e37):
        gradients.model(torch.full((1, 1), size)).sum().backward()
        batch = gradients.take()
        sums = batch.clipped_sums(clip_factors(batch.squared_norms().sum(0).sqrt(), 1e-8))
        moved.append(float(sums[layer.weight].double().norm()))
    gradients.remove()
    assert max(moved) <= 1e-8


@pytest.mark.parametrize(
    ("make", "spectral", "shape"),
    [
        (lambda: nn.Linear(256, 4, bias=False), LayerConfig(LowPassFilter(0.5), input_layout=(16, 16)), (256,)),
        (lambda: nn.Linear(4096, 4, bias=False), LayerConfig(LowPassFilter(0.5), input_layout=(64, 64)), (4096,)),
        (lambda: nn.Conv2d(1, 4, 3, bias=False), LayerConfig(LowPassFilter(0.5), support="signal"), (1, 16, 16)),
    ],
    ids=["matrix", "fast transform", "signal"],
)
def test_what_rounding_lets_through_the_filter_counts(make, spectral, shape):
    """Norm and sum may be computed for batches of other sizes: their rounding errors need not be the same."""
    torch.manual_seed(0)
    module = make()
    rule = find_rule(module)(module, spectral)
    checkerboard = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(
        *(n // 2 for n in (shape[-2:] if len(shape) > 1 else (int(shape[0] ** 0.5),) * 2))
    )
    x = checkerboard.reshape(1, *shape) * 1e6
    dA = torch.randn_like(module(x))
    c = clip_factors(squared_norms(rule, x, dA).sqrt(), C)
    beside = torch.randn(7, *shape) * 1e-3
    for rows in range(8):
        batch = torch.cat([x, beside[:rows]]), torch.cat([dA, torch.zeros(rows, *dA.shape[1:])])
        moved = clipped_sums(rule, *batch, torch.cat([c, torch.ones(rows, dtype=c.dtype)]))["weight"]
        assert float(moved.double().norm()) <= C


@pytest.mark.parametrize("make", [lambda: nn.Embedding(3, 4), lambda: Reused(nn.Conv1d(1, 1, 3, padding=1))])
def test_cancelling_uses_do_not_wipe_out_other_samples(make):
    """Norm zero, but huge terms in the shared sum: their rounding would erase what the others contributed."""
    torch.manual_seed(0)
    model = make()
    gradients = ModelGradients(model)
    embedding = isinstance(model, nn.Embedding)
    x = torch.zeros(50, 6, dtype=torch.long) if embedding else torch.randn(50, 1, 6)
    dA = torch.randn(50, 6, 4) if embedding else torch.randn(50, 1, 6)
    signs = torch.tensor([1.0, -1.0]).repeat(3).view((1, 6, 1) if embedding else (1, 1, 6)) * 2.0**33

    def release(rows):
        huge = signs.expand_as(dA[:1])
        (model(x[:rows]) * torch.cat([dA[: rows - 1], huge if rows == 50 else dA[rows - 1 : rows]])).sum().backward()
        batch = gradients.take()
        c = clip_factors(batch.squared_norms().sum(0).sqrt(), C)
        return torch.cat([v.double().flatten() for v in batch.clipped_sums(c).values()])

    moved = release(50) - release(49)
    gradients.remove()
    assert float(moved.norm()) <= C * (1 + 1e-4)


def test_control_unguarded_token_norms_are_caught(monkeypatch):
    monkeypatch.setattr(norms_module, "rounded_up", lambda squared, *_, **__: squared.clamp(min=0))
    with pytest.raises(AssertionError):
        test_cancelling_tokens_are_bounded_in_float32(64, 6, 5)


@pytest.mark.parametrize("n", [3072, 25088, 200_000])
@pytest.mark.parametrize(
    "make",
    [lambda n: nn.Linear(n, 2), lambda n: nn.Linear(2, n), lambda n: BlockCirculantLinear(n, 8, 8), nn.LayerNorm],
    ids=["inputs", "outputs", "blocks", "normalisation"],
)
def test_long_rows_of_equal_numbers_are_bounded_in_float32(make, n):
    """Squares that are all rounded down (of these values, at these lengths, in eight float32 sums side by side)."""
    module = make(n)
    rule = find_rule(module)(module, LayerConfig())
    for value in (1.5989974737167358, 1.5313283205032349, 1.2155388593673706):
        x = torch.full((1, 2), value) if isinstance(module, nn.Linear) and module.in_features == 2 else None
        x = torch.full((1, n), value) if x is None else x
        dA = torch.full_like(module(x), value)
        c = clip_factors(squared_norms(rule, x, dA).double().sqrt(), C)
        z = {name: g.double() for name, g in clipped_sums(rule, x.double(), dA.double(), c).items()}
        moved = torch.stack([g.square().sum() for g in z.values()]).sum().sqrt()
        assert float(moved) <= C * (1 + 1e-6)


@pytest.mark.parametrize("n", [25088, 200_000])
def test_control_squares_added_one_after_the_other_are_caught(n, monkeypatch):
    """As torch.linalg.vector_norm does on a CPU."""
    from spectral_dp.gradients.rules import linear

    def by_vector_norm(x, dA, _):
        x_lengths, dA_lengths = (torch.linalg.vector_norm(t.flatten(1), dim=1) for t in (x, dA))
        return (x_lengths * dA_lengths).square()

    monkeypatch.setattr(linear, "token_norms", by_vector_norm)
    with pytest.raises(AssertionError):
        test_long_rows_of_equal_numbers_are_bounded_in_float32(lambda n: nn.Linear(n, 2, bias=False), n)


TOKENS = [
    pytest.param(lambda: nn.Linear(5, 1), 1000, id="dense"),
    pytest.param(lambda: nn.Linear(5, 4), 64, id="dense, several"),
    pytest.param(lambda: BlockCirculantLinear(64, 64, 64), 64, id="blocks"),
]


def moved_by_cancelling_tokens(make, tokens):
    """How far a record moves the sums beside one that is left out. Its input is zero, its output gradients cancel.

    Where a record is left out, the others are copied, and the tokens of their biases added up in another order.
    """
    worst = 0.0
    for seed in range(4):
        torch.manual_seed(seed)
        layer = make()
        x = torch.zeros(3, tokens, layer.in_features)
        x[2] = math.nan
        dA = torch.randn(3, tokens, layer.out_features, dtype=torch.float64) * 1e8
        dA[0, -1] = -dA[0, :-1].sum(0)
        gradients = ModelGradients(layer)
        released = []
        for rows in ([0, 1, 2], [1, 2]):
            out, weights = (t.transpose(0, 1).contiguous() for t in (layer(x[rows]), dA[rows].float()))
            (out * weights).sum().backward()
            batch = gradients.take()
            sums = batch.clipped_sums(clip_factors(batch.squared_norms().sum(0).sqrt(), C))
            released.append(torch.cat([z.double().flatten() for z in sums.values()]))
        gradients.remove()
        worst = max(worst, float((released[0] - released[1]).norm()))
    return worst


@pytest.mark.parametrize(("make", "tokens"), TOKENS)
def test_tokens_of_a_bias_that_cancel_are_bounded_in_any_order(make, tokens):
    assert moved_by_cancelling_tokens(make, tokens) <= C


def test_control_biases_added_up_in_one_order_only_are_caught(monkeypatch):
    from spectral_dp.gradients.rules import rule

    monkeypatch.setattr(rule, "bias_norms", lambda dA: dA.sum(1).double().square().sum(1))
    assert moved_by_cancelling_tokens(lambda: nn.Linear(5, 1), 1000) > 1.5 * C


@pytest.mark.parametrize("support", ["kernel", "signal"])
def test_positions_of_a_convolutions_bias_count_whatever_their_order(support, monkeypatch):
    monkeypatch.setattr(KernelConvRule, "forms", lambda *_: False)
    layer = nn.Conv1d(2, 3, 1)
    rule = find_rule(layer)(layer, LayerConfig(support=support))
    dA = torch.randn(1, 3, 64) * 1e8
    dA[..., 32:] = -dA[..., :32]
    errors = 64 * torch.finfo(torch.float32).eps * dA.abs().sum(2).norm()
    assert float(squared_norms(rule, torch.zeros(1, 2, 64), dA).sqrt()) >= float(errors)


EQUAL = [
    pytest.param(lambda: nn.Linear(65536, 8, bias=False), (2, 65536), (2, 8), id="dense"),
    pytest.param(lambda: nn.Conv2d(8192, 8, 1, bias=False), (8192, 2, 2), (8, 2, 2), id="channels"),
    pytest.param(lambda: nn.Conv2d(1, 64, 128, stride=128, bias=False), (1, 128, 128), (64, 1, 1), id="taps"),
]


def moved_by_equal_numbers(make, x_shape, dA_shape):
    module = make()
    rule = find_rule(module)(module, LayerConfig())
    worst = 0.0
    for value in (1.7586207389831543, 1.149999976158142, 1.4500000476837158):
        x, dA = torch.full((1, *x_shape), value), torch.full((1, *dA_shape), 1.9712)
        c = clip_factors(squared_norms(rule, x, dA).sqrt(), C)
        worst = max(worst, float(clipped_sums(rule, x.double(), dA.double(), c)["weight"].double().norm()))
    return worst


@pytest.mark.parametrize(("make", "x_shape", "dA_shape"), EQUAL)
def test_gram_matrices_of_equal_numbers_are_not_rounded_down(make, x_shape, dA_shape, monkeypatch):
    """A small matrix product adds up one after the other: a record of one colour would count for more than C."""
    monkeypatch.setattr(KernelConvRule, "forms", lambda *_: False)
    assert moved_by_equal_numbers(make, x_shape, dA_shape) <= C


@pytest.mark.parametrize(("case", "piece"), [*zip(EQUAL, [1 << 30, 1 << 30, 1], strict=True)])
def test_control_gram_matrices_that_add_one_after_the_other_are_caught(case, piece, monkeypatch):
    """A small product of many channels does so by itself, and products of one tap each do."""
    monkeypatch.setattr(KernelConvRule, "forms", lambda *_: False)
    monkeypatch.setattr(norms_module, "PIECE", piece)
    assert moved_by_equal_numbers(*case.values) > C * (1 + 1e-5)
