"""Dense layers in a public basis: equal to a loop over samples in float64, bounded for hostile samples."""

import math

import pytest
import torch
from tests.support.contributions import SMALL, SMALL_BOUNDS, C
from tests.support.exactness import TOLERANCE, B
from tests.support.oracle import norm_of, relative_error, sample_gradients
from tests.support.recorded_models import Reused
from tests.support.small_targets import public_basis
from torch import nn

from spectral_dp import EigenvalueFilter, LowPassFilter, PublicBasis, ShapedFilter
from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.gradients.rules.linear import LinearRule
from spectral_dp.gradients.rules.linear_in_basis import LinearInBasisRule
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.clipping import clip_factors
from spectral_dp.mechanism.filters import IdentityFilter

FILTERS = {
    "identity": IdentityFilter(),
    "low-pass": LowPassFilter(0.4),
    "paper's order": LowPassFilter(0.4, order="clip_then_filter"),
    "preconditioned": EigenvalueFilter(0.5, 0.01),
    "first axes": EigenvalueFilter(0.5, keep=3),
    "original": EigenvalueFilter(0.5, scale="original"),
    "shaped": ShapedFilter(torch.tensor([1.0, 2, 0, 3, 4])),
}


def config(filter="identity", n=8, k=5):
    return LayerConfig(FILTERS[filter], input_basis=public_basis(n, k))


def recorded(model, gradients, x, dA):
    (model(x) * dA).sum().backward()
    return gradients.take()


def expected(gradients, spectral):
    """Counted and kept coordinates of each sample's weight gradient, by the basis matrix."""
    basis, k = spectral.input_basis, spectral.input_basis.rank
    gains = spectral.filter.gains(basis, (k,))
    z = gradients["weight"] @ basis.basis(k).T * gains.pre.double()
    return z[..., gains.counted], z[..., gains.kept]


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("tokens", [(), (3,), (2, 2), (30,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_norms_and_sums_equal_a_loop_over_samples(filter, tokens, bias):
    module, spectral = nn.Linear(8, 4, bias=bias).double(), config(filter)
    x = torch.randn(B, *tokens, 8, dtype=torch.float64)
    dA, c = torch.randn(B, *tokens, 4, dtype=torch.float64), torch.rand(B, dtype=torch.float64)
    each = sample_gradients(module, (x,), dA)
    counted, kept = expected(each, spectral)
    gradients = ModelGradients(nn.Sequential(module), {"0": spectral})
    batch = recorded(gradients.model, gradients, x, dA)
    assert relative_error(batch.squared_norms().sum(0), norm_of({**each, "weight": counted})) < TOLERANCE
    sums = batch.clipped_sums(c)
    total = torch.tensordot(c, kept, dims=1)
    assert sums[module.weight].shape == total.shape
    assert relative_error(sums[module.weight], total) < TOLERANCE
    if bias:
        assert relative_error(sums[module.bias], torch.tensordot(c, each["bias"], dims=1)) < TOLERANCE
    gains = spectral.filter.gains(spectral.input_basis, (5,))
    back = (total * gains.post.double()[gains.kept]) @ spectral.input_basis.basis(5)[gains.kept]
    assert relative_error(gradients.gradient(module.weight, sums[module.weight]), back) < TOLERANCE
    gradients.remove()


@pytest.mark.parametrize("filter", ["identity", "paper's order", "preconditioned"])
def test_gradients_can_be_formed(filter):
    """As for a parameter that is used in several ways: the same numbers as without forming them."""
    module, spectral = nn.Linear(8, 4).double(), config(filter)
    rule = find_rule(module)(module, spectral)
    x, dA = torch.randn(B, 3, 8, dtype=torch.float64), torch.randn(B, 3, 4, dtype=torch.float64)
    counted, kept = expected(sample_gradients(module, (x,), dA), spectral)
    formed = rule.form(rule.coordinates(x), dA)["weight"]
    assert relative_error(formed, counted) < TOLERANCE
    assert relative_error(rule.released("weight", formed.sum(0)), kept.sum(0)) < TOLERANCE


def test_a_layer_that_is_used_twice_is_clipped_by_the_sum():
    model, spectral = Reused(nn.Linear(8, 8)).double(), config("preconditioned")
    name = next(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    x, dA = torch.randn(B, 8, dtype=torch.float64), torch.randn(B, 8, dtype=torch.float64)
    each = sample_gradients(model, (x,), dA)
    each = {key.rpartition(".")[2]: value for key, value in each.items()}
    counted, _ = expected(each, spectral)
    gradients = ModelGradients(model, {name: spectral})
    batch = recorded(model, gradients, x, dA)
    assert relative_error(batch.squared_norms().sum(0), norm_of({**each, "weight": counted})) < TOLERANCE
    gradients.remove()


def test_a_basis_of_all_directions_changes_nothing_without_gains():
    module = nn.Linear(8, 4).double()
    x, dA = torch.randn(B, 8, dtype=torch.float64), torch.randn(B, 4, dtype=torch.float64)
    found = []
    for spectral in (LayerConfig(), config(n=8, k=8)):
        gradients = ModelGradients(nn.Sequential(module), {"0": spectral})
        batch = recorded(gradients.model, gradients, x, dA)
        sums = batch.clipped_sums(torch.ones(B).double())
        found.append((batch.squared_norms(), gradients.gradient(module.weight, sums[module.weight])))
        gradients.remove()
    assert relative_error(found[1][0], found[0][0]) < 1e-6  # the basis is kept in single precision
    assert relative_error(found[1][1], found[0][1]) < 1e-6


def hostile(n):
    x = torch.randn(n)
    one_nan, one_inf = x.clone(), x.clone()
    one_nan[n // 2], one_inf[0] = math.nan, math.inf
    U = public_basis(n, 5).basis(5, dtype=torch.float32)
    beside = x - (x @ U.T) @ U  # of which the basis sees rounding errors only
    return [
        x,
        x * 1e6,
        x * 1e18,
        x * 1e30,
        x * 1e-30,
        torch.zeros(n),
        torch.ones(n) * 1e6,
        beside * 1e8,
        one_nan,
        one_inf,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("tokens", [(), (3,)], ids=["", "tokens"])
def test_no_sample_moves_the_sums_further_than_the_bound(filter, tokens, dtype):
    """Check B. Norm and sum are of batches of other sizes, as where some samples are left out."""
    torch.manual_seed(0)
    module = nn.Linear(8, 4).to(dtype)
    gradients = ModelGradients(nn.Sequential(module), {"0": config(filter)})

    def release(x):
        x = torch.stack(x).to(dtype) if x else torch.zeros(0, 8, dtype=dtype)
        x = x.unsqueeze(1).expand(-1, *tokens, -1).contiguous() if tokens else x
        dA = torch.linspace(-1, 3, 4 * math.prod(tokens)).view(*tokens, 4).to(dtype)
        batch = recorded(gradients.model, gradients, x, dA.expand(len(x), *dA.shape))
        c = clip_factors(batch.squared_norms().sum(0).sqrt(), C)
        return torch.cat([v.double().flatten() for v in batch.clipped_sums(c).values()])

    for size in (0, 1, 6):
        others = list(torch.randn(size, 8))
        before = release(others)
        for record in hostile(8):
            for batch in ([record, *others], [*others, record]):
                moved = release(batch) - before
                assert bool(moved.isfinite().all())
                assert float(moved.norm()) <= C + 1e-5 * (size > 0)  # other samples round otherwise beside it
    gradients.remove()


def test_negative_control_a_norm_without_gains_lets_samples_through(monkeypatch):
    """Catches a norm of the plain input, |dA| |x|, beside a sum with gains."""
    module, spectral = nn.Linear(8, 4, bias=False).double(), config("preconditioned")
    gradients = ModelGradients(nn.Sequential(module), {"0": spectral})
    original = LinearInBasisRule._inputs
    pre = spectral.filter.gains(spectral.input_basis, (5,)).kept_pre
    monkeypatch.setattr(
        LinearInBasisRule,
        "_inputs",
        lambda self, x, counted=False: original(self, x, counted=counted) / (pre if counted else 1),
    )
    last = spectral.input_basis.basis(5)[-1:]  # along the axis of the largest gain
    batch = recorded(gradients.model, gradients, last * 100, torch.ones(1, 4, dtype=torch.float64))
    sums = batch.clipped_sums(clip_factors(batch.squared_norms().sum(0).sqrt(), C))
    assert float(sums[module.weight].norm()) > 2 * C
    gradients.remove()


def test_underflow_hides_no_product():
    """Squares of the small factor are zero, its product with the large one is not."""
    module = nn.Linear(8, 400, bias=False)
    gradients = ModelGradients(nn.Sequential(module), {"0": config("preconditioned")})
    worst = 0.0
    for large in (1e18, 1e10, 1.0, 1e-10):
        for small in SMALL:
            batch = recorded(gradients.model, gradients, torch.full((1, 8), large), torch.full((1, 400), small))
            norms = batch.squared_norms().sum(0).sqrt()
            for bound in SMALL_BOUNDS:
                (total,) = batch.clipped_sums(clip_factors(norms, bound)).values()
                worst = max(worst, float(total.double().norm()) / bound)
    gradients.remove()
    assert worst <= 1


def test_half_precision_and_autocast_are_computed_in_single_precision():
    module = nn.Linear(8, 4)
    gradients = ModelGradients(nn.Sequential(module), {"0": config()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gradients.model(torch.randn(B, 8))
    out.sum().backward()
    batch = gradients.take()
    assert batch.clipped_sums(torch.ones(B))[module.weight].dtype == torch.float32
    gradients.remove()


def test_a_bias_alone_needs_no_basis():
    module = nn.Linear(8, 4)
    module.weight.requires_grad_(False)
    gradients = ModelGradients(nn.Sequential(module), {"0": config()})
    batch = recorded(gradients.model, gradients, torch.randn(B, 8), torch.ones(B, 4))
    assert torch.equal(batch.clipped_sums(torch.ones(B))[module.bias], torch.full((4,), float(B)))
    gradients.remove()


def test_what_is_kept_until_the_sum_is_as_wide_as_the_basis():
    rule = find_rule(nn.Linear(64, 4))(nn.Linear(64, 4), config(n=64, k=3))
    assert rule.coordinates(torch.randn(B, 64)).shape == (B, 3)
    assert rule.coefficient_shape("weight") == (4, 3)


class TestWhichRule:
    def test_a_layer_without_a_basis_has_the_plain_one(self):
        module = nn.Linear(8, 4)
        assert type(find_rule(module)(module, LayerConfig())) is LinearRule
        assert type(find_rule(module)(module, config())) is LinearInBasisRule

    def test_a_basis_of_another_width_is_refused(self):
        module = nn.Linear(9, 4)
        with pytest.raises(ValueError, match="basis is for 8 inputs, but the layer has 9"):
            find_rule(module)(module, config())

    @pytest.mark.parametrize("make", [lambda: nn.Conv1d(8, 4, 1), lambda: BlockCirculantLinear(8, 8, 4)])
    def test_other_layers_take_none(self, make):
        """Catches a basis that is silently ignored."""
        module = make()
        with pytest.raises(ValueError, match="an input basis is for nn"):
            find_rule(module)(module, config())

    def test_a_basis_and_another_transform_are_refused(self):
        basis = public_basis()
        for other in ({"input_layout": (8,)}, {"transform": "dct"}):
            with pytest.raises(ValueError, match="leave input_layout and transform out"):
                LayerConfig(input_basis=basis, **other)

    def test_a_spectrum_is_not_a_basis(self):
        with pytest.raises(TypeError, match="as_basis"):
            LayerConfig(input_basis=torch.eye(8))

    def test_a_filter_of_another_size_is_refused(self):
        with pytest.raises(ValueError, match="do not fit coordinates"):
            find_rule(nn.Linear(8, 4))(
                nn.Linear(8, 4), LayerConfig(ShapedFilter(torch.ones(8)), input_basis=public_basis(8, 5))
            )

    def test_a_basis_of_one_axis(self):
        basis = PublicBasis(torch.eye(8)[:, :1], torch.ones(1))
        rule = find_rule(nn.Linear(8, 4))(nn.Linear(8, 4), LayerConfig(input_basis=basis))
        assert rule.coefficient_shape("weight") == (4, 1)
