"""Every rule x shape x option equals a loop over samples in float64 to 1e-9."""

import pytest
import torch
from tests.support.oracle import coordinates, correlation_at_all_lags, norm_of, relative_error, sample_gradients
from tests.support.uses import clipped_sums, squared_norms
from torch import nn
from torch.nn import functional as F

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients import sums as weighted_sums
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.gradients.rules.conv_norms import explicitly_padded
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.mechanism.filters import AnnealedFilter, IdentityFilter, LowPassFilter, PaperBandFilter, ShapedFilter

B = 5
TOLERANCE = 1e-9


def rule_of(module, spectral=None):
    return find_rule(module)(module, spectral or LayerConfig())


def setting(module, *shape):
    module.double()
    x = torch.randn(B, *shape, dtype=torch.float64)
    dA = torch.randn_like(module(x))
    return x, dA, torch.rand(B, dtype=torch.float64)


def check(rule, x, dA, c, kept, counted):
    """Norms, sums and per-sample coordinates of a rule against those of the oracle, by parameter name."""
    assert relative_error(squared_norms(rule, x, dA), norm_of(counted)) < TOLERANCE
    sums = clipped_sums(rule, x, dA, c)
    assert sums.keys() == kept.keys()
    for name, z in kept.items():
        expected = torch.tensordot(c, z, dims=1)
        assert tuple(sums[name].shape) == rule.coefficient_shape(name)
        assert relative_error(sums[name].flatten(), expected.flatten()) < TOLERANCE
    per_sample = rule.form(x, dA)
    for name, z in counted.items():
        assert relative_error(per_sample[name].flatten(1), z.flatten(1)) < TOLERANCE


CONVOLUTIONS = [
    pytest.param(nn.Conv2d(3, 4, 3), (3, 7, 6), id="plain"),
    pytest.param(nn.Conv2d(3, 4, 3, padding=1, bias=False), (3, 6, 6), id="padding, no bias"),
    pytest.param(nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 7, 8), id="stride"),
    pytest.param(nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0)), (2, 9, 8), id="non-square"),
    pytest.param(nn.Conv2d(2, 3, 3, dilation=2), (2, 8, 7), id="dilation"),
    pytest.param(nn.Conv2d(2, 4, 3, dilation=(2, 1), stride=(1, 2), padding=2), (2, 8, 7), id="dilation and stride"),
    pytest.param(nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5), id="groups"),
    pytest.param(nn.Conv2d(4, 8, 3, groups=4, padding=1, stride=2), (4, 6, 6), id="depthwise"),
    pytest.param(nn.Conv2d(5, 4, 1), (5, 4, 3), id="1x1"),
    pytest.param(nn.Conv2d(2, 3, 5, padding=2), (2, 6, 6), id="5x5"),
    pytest.param(nn.Conv2d(2, 3, 3, padding="same", dilation=2), (2, 6, 5), id="same"),
    pytest.param(nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 6, 5), id="same, asymmetric"),
    pytest.param(nn.Conv2d(2, 3, 3, padding="valid"), (2, 6, 5), id="valid"),
    pytest.param(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 6, 5), id="reflect"),
    pytest.param(nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"), (2, 6, 5), id="circular"),
    pytest.param(nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="replicate", stride=2), (2, 6, 5), id="replicate"),
    pytest.param(nn.Conv1d(3, 4, 5, padding=2), (3, 11), id="1-D"),
    pytest.param(nn.Conv1d(4, 4, 3, stride=2, dilation=2, groups=2), (4, 12), id="1-D stride dilation groups"),
    pytest.param(nn.Conv1d(2, 2, 4, padding=3, padding_mode="circular"), (2, 9), id="1-D circular"),
]
FILTERS = [
    IdentityFilter(),
    LowPassFilter(0.0),
    LowPassFilter(0.5),
    LowPassFilter(0.3, region="box"),
    LowPassFilter(0.5, order="clip_then_filter"),
    AnnealedFilter(0.7, 0.0, 10),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own advice
class TestConvolution:
    @pytest.mark.parametrize("uses_gram", [True, False], ids=["gram", "materialise"])
    @pytest.mark.parametrize("filter", FILTERS, ids=repr)
    @pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
    def test_kernel_support(self, module, shape, filter, uses_gram, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
        monkeypatch.setattr(weighted_sums, "CHUNK_BYTES", 1)  # two samples at a time
        x, dA, c = setting(module, *shape)
        spectral = LayerConfig(filter)
        gradients = sample_gradients(module, (x,), dA)
        kernel = tuple(module.kernel_size)
        kept, counted = coordinates(gradients["weight"], kernel, spectral, "dct")
        if isinstance(filter, IdentityFilter):
            kept = counted = gradients["weight"]
        rule = rule_of(module, spectral)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})
        # What comes back is the gradient without the coordinates that were dropped.
        total = rule.gradient("weight", clipped_sums(rule, x, dA, c)["weight"])
        if not isinstance(filter, IdentityFilter):
            gains = filter.gains(rule.transform, kernel)
            z = rule.transform.forward(torch.tensordot(c, gradients["weight"], dims=1), tuple(range(-len(kernel), 0)))
            expected = rule.transform.inverse(z * gains.kept, tuple(range(-len(kernel), 0)))
            assert relative_error(total, expected) < TOLERANCE

    @pytest.mark.parametrize("transform", ["fourier", "haar", "hadamard"])
    @pytest.mark.parametrize("uses_gram", [True, False])
    def test_other_transforms(self, transform, uses_gram, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
        module = nn.Conv2d(2, 3, 4, padding=1)
        x, dA, c = setting(module, 2, 6, 6)
        spectral = LayerConfig(LowPassFilter(0.6), transform=transform)
        gradients = sample_gradients(module, (x,), dA)
        kept, counted = coordinates(gradients["weight"], (4, 4), spectral, transform)
        check(rule_of(module, spectral), x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})

    @pytest.mark.parametrize("uses_gram", [True, False])
    def test_shaped_gains(self, uses_gram, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
        module = nn.Conv2d(2, 3, 3)
        x, dA, c = setting(module, 2, 6, 6)
        spectral = LayerConfig(ShapedFilter(torch.rand(3, 3) + 0.1))
        gradients = sample_gradients(module, (x,), dA)
        kept, counted = coordinates(gradients["weight"], (3, 3), spectral, "dct")
        rule = rule_of(module, spectral)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})
        total = rule.gradient("weight", clipped_sums(rule, x, dA, c)["weight"])
        assert relative_error(total, torch.tensordot(c, gradients["weight"], dims=1)) < TOLERANCE

    @pytest.mark.parametrize(
        "filter",
        [
            IdentityFilter(),
            LowPassFilter(0.5),
            LowPassFilter(0.6, region="box"),
            PaperBandFilter(0.4),
            PaperBandFilter(0.5, order="clip_then_filter"),
        ],
        ids=repr,
    )
    @pytest.mark.parametrize(("module", "shape"), CONVOLUTIONS)
    def test_signal_support(self, module, shape, filter):
        """Algorithm 2, against correlations at all lags computed by shifting."""
        x, dA, c = setting(module, *shape)
        padded, padding = explicitly_padded(module, x)
        padded = F.pad(padded, [p for n in reversed(padding) for p in (n, n)])
        lags = torch.stack([correlation_at_all_lags(padded[b], dA[b], module.stride, module.groups) for b in range(B)])
        size = tuple(padded.shape[2:])
        spectral = LayerConfig(filter, support="signal")
        kept, counted = coordinates(lags, size, spectral, "fourier")
        gradients = sample_gradients(module, (x,), dA)
        rule = rule_of(module, spectral)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})
        total = rule.gradient("weight", clipped_sums(rule, x, dA, c)["weight"])
        assert total.shape == module.weight.shape
        if isinstance(filter, IdentityFilter):  # nothing dropped: the crop is the kernel's gradient
            assert relative_error(total, torch.tensordot(c, gradients["weight"], dims=1)) < TOLERANCE

    def test_signal_support_knows_its_size_from_the_layout(self):
        module = nn.Conv2d(2, 3, 3, padding=(1, 2))
        told = rule_of(module, LayerConfig(LowPassFilter(0.5), support="signal", input_layout=(2, 6, 5)))
        x, dA, _ = setting(module, 2, 6, 5)
        learnt = rule_of(module, LayerConfig(LowPassFilter(0.5), support="signal"))
        with pytest.raises(RuntimeError, match="input_layout"):
            learnt.coefficient_shape("weight")
        squared_norms(learnt, x, dA)
        assert told.coefficient_shape("weight") == learnt.coefficient_shape("weight")
        with pytest.raises(ValueError, match="support='kernel'"):
            squared_norms(learnt, x[..., :4, :], dA[..., :4, :])
        with pytest.raises(ValueError, match="does not fit"):
            rule_of(module, LayerConfig(support="signal", input_layout=(6, 5)))

    def test_signal_support_needs_fourier_and_even_gains(self):
        module = nn.Conv2d(1, 1, 2)
        with pytest.raises(ValueError, match="Fourier"):
            rule_of(module, LayerConfig(support="signal", transform="dct"))
        uneven = torch.ones(3, 3)
        uneven[0, 1] = 2  # the cosine of a frequency but not its sine
        with pytest.raises(ValueError, match="same pre-gain"):
            rule_of(module, LayerConfig(ShapedFilter(uneven), support="signal", input_layout=(1, 3, 3)))

    def test_an_unbatched_sample_is_refused(self):
        module = nn.Conv2d(1, 1, 2)
        with pytest.raises(ValueError, match=r"x\[None\]"):
            squared_norms(rule_of(module), torch.zeros(1, 4, 4), torch.zeros(1, 3, 3))


LAYOUT_FILTERS = [
    LowPassFilter(0.0),
    LowPassFilter(0.6),
    LowPassFilter(0.4, region="box"),
    LowPassFilter(0.5, order="clip_then_filter"),
]


class TestLinear:
    @pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (30, 7)], ids=str)
    @pytest.mark.parametrize("bias", [True, False])
    def test_with_and_without_tokens(self, shape, bias):
        """Adding the norms of the tokens instead of taking the norm of their sum would fail here."""
        module = nn.Linear(7, 4, bias=bias)
        x, dA, c = setting(module, *shape)
        gradients = sample_gradients(module, (x,), dA)
        check(rule_of(module), x, dA, c, gradients, gradients)

    @pytest.mark.parametrize("filter", LAYOUT_FILTERS, ids=repr)
    @pytest.mark.parametrize("layout", [(3, 4, 4), (1, 6, 8), (48,), (6, 8)], ids=str)
    @pytest.mark.parametrize("tokens", [(), (3,)], ids=["", "tokens"])
    def test_with_an_input_layout(self, filter, layout, tokens):
        module = nn.Linear(48, 5)
        x, dA, c = setting(module, *tokens, 48)
        spectral = LayerConfig(filter, input_layout=layout)
        gradients = sample_gradients(module, (x,), dA)
        plane = layout[1:] or layout
        as_planes = gradients["weight"].unflatten(-1, layout if len(layout) > 1 else (1, *layout))
        kept, counted = coordinates(as_planes, plane, spectral, "dct")
        rule = rule_of(module, spectral)
        check(rule, x, dA, c, {**gradients, "weight": kept}, {**gradients, "weight": counted})
        if filter.ratio == 0:
            total = rule.gradient("weight", clipped_sums(rule, x, dA, c)["weight"])
            assert relative_error(total, torch.tensordot(c, gradients["weight"], dims=1)) < TOLERANCE

    def test_a_layout_that_does_not_fit_is_refused(self):
        with pytest.raises(ValueError, match=r"48 inputs"):
            rule_of(nn.Linear(48, 5), LayerConfig(LowPassFilter(0.5), input_layout=(3, 5, 5)))

    def test_a_filter_without_a_layout_is_refused(self):
        with pytest.raises(ValueError, match="input_layout"):
            rule_of(nn.Linear(48, 5), LayerConfig(LowPassFilter(0.5)))


class TestEmbedding:
    @pytest.mark.parametrize("shape", [(), (6,), (2, 3)], ids=str)
    @pytest.mark.parametrize("padding_idx", [None, 2])
    def test_repeated_tokens_add_before_the_norm(self, shape, padding_idx):
        module = nn.Embedding(4, 3, padding_idx=padding_idx).double()
        x = torch.randint(4, (B, *shape))
        dA = torch.randn(B, *shape, 3, dtype=torch.float64)
        gradients = sample_gradients(module, (x,), dA)
        check(rule_of(module), x, dA, torch.rand(B).double(), gradients, gradients)

    def test_options_that_mix_samples_are_refused(self):
        with pytest.raises(ValueError, match="scale_grad_by_freq"):
            rule_of(nn.Embedding(4, 3, scale_grad_by_freq=True))
        with pytest.raises(ValueError, match="max_norm"):
            rule_of(nn.Embedding(4, 3, max_norm=1.0))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.LayerNorm(6), (6,)),
        (nn.LayerNorm(6), (3, 6)),
        (nn.LayerNorm((4, 6)), (2, 4, 6)),
        (nn.LayerNorm(6, bias=False), (3, 6)),
        (nn.RMSNorm(6), (3, 6)),
        (nn.GroupNorm(2, 6), (6, 4, 3)),
        (nn.GroupNorm(3, 6), (6,)),
        (nn.GroupNorm(2, 6), (6, 5)),
        (nn.InstanceNorm1d(3, affine=True), (3, 8)),
        (nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
        (nn.InstanceNorm3d(2, affine=True), (2, 3, 3, 2)),
    ],
    ids=lambda v: str(v),
)
def test_normalisation(module, shape):
    x, dA, c = setting(module, *shape)
    with torch.no_grad():
        module.weight.uniform_(0.5, 2)
    gradients = sample_gradients(module, (x,), dA)
    check(rule_of(module), x, dA, c, gradients, gradients)


KINDS = [
    (nn.Linear(6, 3), (6,)),
    (nn.Conv2d(2, 3, 3), (2, 5, 5)),
    (nn.LayerNorm(6), (6,)),
]


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize(("module", "shape"), KINDS, ids=lambda v: str(v))
def test_frozen_parameters_are_not_there(module, shape, frozen):
    x, dA, c = setting(module, *shape)
    module.requires_grad_(True)
    getattr(module, frozen).requires_grad_(False)
    gradients = sample_gradients(module, (x,), dA)
    check(rule_of(module), x, dA, c, gradients, gradients)
    module.requires_grad_(True)


@pytest.mark.parametrize(
    "spectral", [LayerConfig(), LayerConfig(LowPassFilter(0.5), support="signal", input_layout=(2, 5, 5))]
)
@pytest.mark.parametrize(("module", "shape"), KINDS, ids=lambda v: str(v))
def test_an_empty_batch_has_no_norms_and_sums_of_zero(module, shape, spectral):
    if spectral.support == "signal" and not isinstance(module, nn.Conv2d):
        spectral = LayerConfig()
    x, dA, c = setting(module, *shape)
    rule = rule_of(module, spectral)
    assert squared_norms(rule, x[:0], dA[:0]).shape == (0,)
    for name, value in clipped_sums(rule, x[:0], dA[:0], c[:0]).items():
        assert tuple(value.shape) == rule.coefficient_shape(name)
        assert float(value.abs().sum()) == 0


def test_other_layers_have_nothing_to_filter():
    with pytest.raises(ValueError, match="no spectrum"):
        rule_of(nn.LayerNorm(4), LayerConfig(LowPassFilter(0.5)))


def test_unknown_support_is_refused():
    with pytest.raises(ValueError, match="'kernel' or 'signal'"):
        LayerConfig(support="image")
