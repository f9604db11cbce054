"""The per-sample gradients of whole models: sharing, reuse, fallback, hostile samples, memory, Opacus as an oracle."""

import copy
import functools
import warnings

import pytest
import torch
from tests.support.oracle import norm_of, relative_error, sample_gradients
from tests.support.recorded_models import TOLERANCE, Reused, check, images, run, small_cnn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.clipping import clip_factors
from spectral_dp.mechanism.filters import LowPassFilter


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.middle = nn.Linear(5, 5)
        self.decode = nn.Linear(5, 7)
        self.decode.weight = self.embed.weight

    def forward(self, x):
        return self.decode(torch.tanh(self.middle(self.embed(x))))


class TestSharing:
    def test_a_plain_model(self):
        check(small_cnn(), images())

    @pytest.mark.parametrize("uses_gram", [True, False])
    def test_a_convolution_called_several_times(self, uses_gram, monkeypatch):
        """Adding the norms of the uses, instead of taking the norm of the sum, would fail here."""
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
        check(Reused(nn.Conv2d(2, 2, 3, padding=1)).double(), images())

    @pytest.mark.parametrize("uses_gram", [True, False])
    def test_convolutions_that_share_their_weight_and_not_their_biases(self, uses_gram, monkeypatch):
        """A bias that only the first of them has must not be forgotten: it would get noise and never learn."""
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: not uses_gram)
        model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 3, padding=(0, 2), dilation=2))
        model[2].weight = model[0].weight
        check(model.double(), images())

    def test_coordinates_of_different_spectra_are_not_added(self):
        """As many numbers of each, and no two of them belong together."""
        model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=(1, 0)), nn.Conv2d(2, 2, 3, padding=(1, 2)))
        model[1].weight = model[0].weight
        spectral = {name: LayerConfig(LowPassFilter(0.5), support="signal") for name in "01"}
        gradients = ModelGradients(model.double(), spectral)
        model(images()).sum().backward()
        with pytest.raises(ValueError, match="must see inputs of one size"):
            gradients.take().squared_norms()
        gradients.remove()

    @pytest.mark.parametrize("layer", [nn.Conv2d(2, 2, 3, padding=1), nn.Linear(6, 6), BlockCirculantLinear(6, 6, 3)])
    @pytest.mark.parametrize("is_filtered", [False, True])
    def test_sums_have_one_shape_however_often_a_layer_is_called(self, layer, is_filtered):
        """Else the parts of a logical step could not be added where some use the layer more often than others."""
        if is_filtered and isinstance(layer, nn.Linear):
            pytest.skip("has no spectrum of its own")
        spectral = {"layer": LayerConfig(LowPassFilter(0.5))} if is_filtered else {}
        model = Reused(layer).double()
        gradients = ModelGradients(model, spectral)
        shapes = []
        for forward in (model, layer):  # three times, once
            forward(images()).sum().backward()
            sums = gradients.take().clipped_sums(torch.ones(4))
            shapes.append([value.shape for value in sums.values()])
        gradients.remove()
        assert shapes[0] == shapes[1]

    def test_a_dense_layer_called_several_times(self):
        check(Reused(nn.Linear(6, 6)).double(), images())

    def test_a_normalisation_called_several_times(self):
        check(Reused(nn.LayerNorm(6)).double(), images())

    def test_a_weight_tied_between_an_embedding_and_a_dense_layer(self):
        model = TiedAutoencoder().double()
        check(model, torch.randint(7, (4, 3)))
        gradients = ModelGradients(model)
        assert [[layer.name for layer in block] for block in gradients.blocks] == [["middle"], ["embed", "decode"]]
        gradients.remove()

    def test_one_module_under_two_names(self):
        layer = nn.Linear(6, 6)
        check(nn.Sequential(layer, nn.Tanh(), layer).double(), torch.randn(4, 6, dtype=torch.float64))

    def test_several_forward_passes_before_one_backward(self):
        model, x, y = small_cnn(), images(), images()
        gradients = ModelGradients(model)
        (model(x).sum() + model(y).sum()).backward()
        norms = gradients.take().squared_norms().sum(0)
        gradients.remove()
        one = torch.ones(4, 3, dtype=torch.float64)
        first, second = (sample_gradients(model, (v,), one) for v in (x, y))
        assert relative_error(norms, norm_of({k: first[k] + second[k] for k in first})) < TOLERANCE

    def test_shared_and_filtered_alike(self):
        layer = nn.Conv2d(2, 2, 3, padding=1)
        model = Reused(layer).double()
        gradients, batch, dA = run(model, images(), {"layer": LayerConfig(LowPassFilter(0.5))})
        rule = gradients.blocks[0][0].rule
        gradients.remove()
        expected = sample_gradients(model, (images(),), dA)["layer.weight"]
        assert batch.squared_norms().shape == (1, 4)
        assert batch.clipped_sums(torch.ones(4))[layer.weight].shape == (2, 2, 4)
        x = images()
        gradients, batch, dA = run(model, x, {"layer": LayerConfig(LowPassFilter(0.5))})
        gradients.remove()
        raw = sample_gradients(model, (x,), dA)
        expected = {"weight": rule.projection.analyse(raw["layer.weight"]), "bias": raw["layer.bias"]}
        assert relative_error(batch.squared_norms()[0], norm_of(expected)) < TOLERANCE


@pytest.mark.filterwarnings("ignore:no rule for")
def test_autocast():
    """Inputs and gradients come in bfloat16; norms and sums are taken in the precision of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten(),
        nn.Linear(144, 6), nn.LayerNorm(6), Scaled(), nn.Linear(6, 3),
    )  # fmt: skip
    x = images().float()
    gradients = ModelGradients(model)
    norms = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = model(x)
        out.float().square().sum().backward()
        batch = gradients.take()
        norms.append(batch.squared_norms())
        assert all(v.dtype == torch.float32 for v in batch.clipped_sums(torch.ones(4)).values())
    gradients.remove()
    torch.testing.assert_close(norms[1], norms[0], rtol=0.1, atol=1e-3)


class TestTheModelIsChangedAfterwards:
    def test_a_new_head_is_refused(self):
        """Its gradients would bypass clipping and noise."""
        model = small_cnn()
        gradients = ModelGradients(model)
        model[8] = nn.Linear(5, 3).double()
        model(images()).sum().backward()
        with pytest.raises(ValueError, match=r"8\.weight.*not there"):
            gradients.take()
        gradients.remove()

    @pytest.mark.filterwarnings(
        "ignore:no rule for", "ignore:torch.func cannot run", "ignore:There is a performance drop"
    )
    def test_buffers_that_learn_from_raw_data_are_refused(self):
        class RunningMean(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(6))
                self.register_buffer("mean", torch.zeros(6))

            def forward(self, x):
                with torch.no_grad():
                    self.mean.lerp_(x.mean(0), 0.1)
                return x * self.weight

        class NewTensor(RunningMean):
            def forward(self, x):
                self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
                return x * self.weight

        for make in (RunningMean, NewTensor):
            model = nn.Sequential(make())
            gradients = ModelGradients(model)
            model(torch.randn(3, 6)).sum().backward()
            with pytest.raises(RuntimeError, match=r"0\.mean.*raw data"):
                gradients.take()
            gradients.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_are_clipped_in_float32(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).to(dtype)
    gradients = ModelGradients(model)
    model(torch.randn(1, 40, dtype=dtype) * 100).square().sum().backward()
    batch = gradients.take()
    c = clip_factors(batch.squared_norms().sum(0).sqrt(), 0.7)
    sums = batch.clipped_sums(c)
    gradients.remove()
    assert all(v.dtype == torch.float32 for v in sums.values())
    norm = float(torch.stack([v.double().square().sum() for v in sums.values()]).sum().sqrt())
    assert 0.99 * 0.7 < norm <= 0.7


@pytest.mark.filterwarnings("ignore:no rule for")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_weights_computed_by_old_style_hooks():
    """``weight`` is not a parameter there: the layer's own rule would leave ``weight_g`` and ``weight_v`` untrained."""
    layer = torch.nn.utils.weight_norm(nn.Linear(6, 6))
    check(nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 2)).double(), images())


class TestWhatIsTrained:
    def test_frozen_parameters_are_not_released_and_cost_nothing(self):
        model = small_cnn()
        model[0].requires_grad_(False)
        check(model, images())
        gradients, batch, _ = run(model, images())
        gradients.remove()
        assert model[0].weight not in batch.clipped_sums(torch.ones(4))

    def test_unfreezing_later_is_noticed(self):
        model = small_cnn()
        model[0].requires_grad_(False)
        gradients = ModelGradients(model)
        model[0].requires_grad_(True)
        model(images()).sum().backward()
        assert model[0].weight in gradients.take().clipped_sums(torch.ones(4))
        gradients.remove()

    def test_unused_parameters_are_released_as_zeros(self):
        """Left out, they would miss their noise, and its absence would tell that nobody used them."""
        model = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Conv2d(1, 2, 3)})
        gradients = ModelGradients(model, {"b": LayerConfig(LowPassFilter(0.5))})
        model["a"](torch.randn(4, 6)).sum().backward()
        sums = gradients.take().clipped_sums(torch.ones(4))
        gradients.remove()
        assert set(sums) == set(model.parameters())
        assert sums[model["b"].weight].shape == (2, 1, 4)

    def test_no_backward_no_contribution(self):
        model = small_cnn()
        gradients = ModelGradients(model)
        sums = gradients.take().clipped_sums(torch.ones(0))
        gradients.remove()
        assert all(float(v.abs().sum()) == 0 for v in sums.values())

    def test_empty_batches(self):
        gradients, batch, _ = run(small_cnn(), images(0))
        gradients.remove()
        assert batch.squared_norms().shape == (6, 0)
        assert all(float(v.abs().sum()) == 0 for v in batch.clipped_sums(torch.ones(0)).values())

    @pytest.mark.parametrize(
        "spectral",
        [
            {},
            {"layer": LayerConfig(LowPassFilter(0.75))},
            {"layer": LayerConfig(LowPassFilter(0.5), support="signal")},  # it does not know its size before
        ],
        ids=["plain", "filtered", "signal"],
    )
    @pytest.mark.parametrize("views", [1, 2])
    def test_empty_batches_of_which_several_uses_would_be_added(self, views, spectral):
        """Poisson batches may be empty: the run would end there, which also tells that nobody was drawn."""
        model = (
            Reused(nn.Conv2d(32, 32, 3, padding=1)) if views == 1 else nn.ModuleDict({"layer": nn.Conv2d(32, 32, 3)})
        )
        gradients = ModelGradients(model, spectral)
        (model if views == 1 else model["layer"])(torch.zeros(0, 32, 6, 6)).sum().backward()
        batch = gradients.take(views)
        gradients.remove()
        assert batch.squared_norms().shape == (1, 0)
        sums = batch.clipped_sums(torch.ones(0))
        assert {p: (tuple(v.shape), float(v.abs().sum())) for p, v in sums.items()} == {
            p: (tuple(gradients.zeros(p).shape), 0.0) for p in model.parameters()
        }


class Scaled(nn.Module):
    """A layer nobody has a rule for, with a tensor and an option among its arguments."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x, shift=None, *, power=1):
        out = self.inner(x) * self.scale**power
        return out if shift is None else out + self.scale * shift


@pytest.mark.filterwarnings("ignore:no rule for")
class TestFallback:
    def test_is_exact(self):
        check(nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Tanh(), nn.Linear(6, 2)).double(), images())

    def test_called_with_several_arguments(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.odd = nn.Linear(6, 6), Scaled()

            def forward(self, x):
                return self.odd(self.first(x), shift=x, power=2)

        check(Model().double(), torch.randn(4, 6, dtype=torch.float64))

    @pytest.mark.parametrize(
        "wrap", [lambda x: {"x": x}, lambda x: (x, 2), lambda x: [{"x": (x,)}]], ids=["dict", "tuple", "nested"]
    )
    def test_inputs_inside_containers(self, wrap):
        """Taken as shared by all samples, every per-sample gradient would be that of the whole batch."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.token, self.layer = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

            def forward(self, batch):
                (x,) = (t for t in tree_leaves(batch) if isinstance(t, torch.Tensor))
                return self.layer(x + self.token)

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = Model()

            def forward(self, x):
                return self.inner(wrap(x))

        check(Outer().double(), torch.randn(4, 6, dtype=torch.float64))

    def test_a_module_that_does_not_return_one_entry_a_sample_is_refused(self):
        class Summing(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(6))

            def forward(self, x):
                return (x * self.weight).sum(0)

        with pytest.raises(RuntimeError, match="given one sample"):
            run(nn.Sequential(Summing()), torch.randn(6, 6))

    @pytest.mark.parametrize("batch", [5, 6])
    def test_a_shared_argument_as_long_as_the_batch_is_never_silently_wrong(self, batch):
        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(6))

            def forward(self, x, table):
                return (x @ table) * self.weight

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.shared = Shared()

            def forward(self, x):
                return self.shared(x, torch.arange(36.0, dtype=x.dtype).view(6, 6))

        model, x = Model().double(), torch.randn(batch, 6, dtype=torch.float64)
        if batch != 6:
            check(model, x)
            return
        with pytest.raises(RuntimeError):
            run(model, x)

    def test_a_module_that_mixes_samples_is_refused(self):
        class Centred(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(6))

            def forward(self, x):
                return (x - x.mean(0)) * self.weight

        with pytest.raises(RuntimeError, match="mixes them"):
            run(nn.Sequential(Centred()), torch.randn(4, 6))

    def test_a_forward_patched_on_an_instance(self):
        layer = nn.Linear(6, 2)
        layer.forward = lambda x: nn.functional.linear(2 * x, layer.weight, layer.bias)
        check(nn.Sequential(layer).double(), torch.randn(4, 6, dtype=torch.float64))

    @pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, which says so itself
    def test_covers_attention(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

            def forward(self, x):
                return self.out(self.attention(x, x, x, need_weights=False)[0])

        check(Model().double(), torch.randn(3, 5, 4, dtype=torch.float64))

    def test_parameters_of_the_model_itself(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.token, self.layer = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 3)

            def forward(self, x):
                return self.layer(x + self.token)

        check(Model().double(), torch.randn(3, 4, dtype=torch.float64))

    def test_parametrized_layers(self):
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        check(nn.Sequential(layer, nn.Linear(6, 2)).double(), images())

    def test_batch_norm_in_eval_mode(self):
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).double().eval()
        check(model, images())

    def test_randomness_that_cannot_be_repeated_is_refused(self):
        """A generator of the module's own; what the default ones draw is given again (see ``test_fallback.py``)."""

        class Noisy(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.generator = nn.Parameter(torch.ones(6)), torch.Generator()

            def forward(self, x):
                return x * self.weight * torch.bernoulli(torch.full_like(x, 0.5), generator=self.generator)

        with pytest.raises(RuntimeError, match=r"nn\.Dropout"):
            run(nn.Sequential(Noisy()).double(), images())


def test_the_fallback_says_once_that_it_is_slower():
    class Unheard(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return x * self.weight

    with pytest.warns(UserWarning, match="Unheard.*slower"):
        ModelGradients(nn.Sequential(Unheard())).remove()
    ModelGradients(nn.Sequential(Unheard())).remove()  # a second warning would be an error


class Flattening(nn.Module):
    """Folds four rows of every sample into the first dimension for its second layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.b(self.a(x).flatten(0, 1)).unflatten(0, (-1, 4))


def test_rows_of_a_sample_side_by_side_add_up():
    check(Flattening().double(), torch.randn(3, 4, 6).double())


def test_batches_of_different_sizes_in_one_backward_pass_are_refused():
    gradients = ModelGradients(model := nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
    (model(torch.randn(3, 6)).sum() + model[0](torch.randn(7, 6)).sum()).backward()
    with pytest.raises(ValueError, match="saw different numbers of rows") as error:
        gradients.take()
    gradients.remove()
    assert not any(digit in str(error.value) for digit in "23456789"), "the realised batch size is private"


def test_errors_do_not_tell_the_realised_batch_size():
    """It is drawn at random and private, and errors end up in log files."""
    model = nn.Sequential(nn.Linear(6, 2))
    gradients = ModelGradients(model)
    model(torch.randn(7, 6)).sum().backward()
    with pytest.raises(ValueError, match="do not divide by views=2") as error:
        gradients.take(views=2)
    assert "7" not in str(error.value)
    for _ in range(3):
        model(torch.randn(7, 6)).sum().backward()
    with pytest.raises(ValueError, match="several backward passes"):
        gradients.take()
    gradients.remove()


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_a_layer_that_all_samples_share(samples):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions, self.out = nn.Embedding(5, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.out(x + self.positions(torch.arange(5)[None]))

    check(Positions().double(), torch.randn(samples, 5, 6).double())


# Memory: nothing of the size of samples x parameters, counted in elements rather than seconds.


class LargestTensor(TorchDispatchMode):
    """Remembers the largest number of elements that any operation allocated."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


def largest_in_gram_path(samples):
    module = nn.Conv2d(64, 64, 3, padding=1)
    rule = KernelConvRule(module, LayerConfig(LowPassFilter(0.5)))
    x, dA = torch.randn(samples, 64, 4, 4), torch.randn(samples, 64, 4, 4)
    assert not rule.forms(x, dA), "small maps, many channels"
    with LargestTensor() as largest:
        rule.squared_norms(x, dA)
        rule.clipped_sum(x, dA, torch.ones(samples))
    return largest.numel, module.weight.numel()


def test_the_gram_path_stores_no_per_sample_gradients():
    """With 128 samples they would be 128 x 36,864 numbers; chunks keep the largest temporary constant."""
    few, parameters = largest_in_gram_path(64)
    many, _ = largest_in_gram_path(512)
    assert many < 512 * parameters / 8
    assert many <= max(few, 512 * 64 * 6 * 6), "at most the padded input grows with the batch"


def test_control_materialising_would_be_counted():
    module = nn.Conv2d(64, 64, 3, padding=1)
    rule = KernelConvRule(module, LayerConfig())
    x = torch.randn(64, 64, 4, 4)
    with LargestTensor() as largest:
        rule.form(x, x)
    assert largest.numel >= 64 * module.weight.numel()


def test_a_dense_layer_stores_no_per_sample_gradients():
    module = nn.Linear(512, 512)
    gradients, batch, _ = run(module, torch.randn(64, 512))
    with LargestTensor() as largest:
        batch.clipped_sums(batch.squared_norms().sum(0))
    gradients.remove()
    assert largest.numel <= 512 * 512


# Opacus: an independent implementation of per-sample gradients.


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (small_cnn, (2, 6, 6)),
        (
            lambda: nn.Sequential(nn.Conv1d(3, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)),
            (3, 8),
        ),
        (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, dilation=2), nn.InstanceNorm2d(4, affine=True)), (2, 8, 8)),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2)), (7, 6)),
        (lambda: Reused(nn.Linear(6, 6)), (3, 6)),
    ],
)
def test_agrees_with_opacus(make, shape):
    opacus = pytest.importorskip("opacus", reason="the independent oracle, from the 'baseline' extra")
    model = make().double()
    x = torch.randn(5, *shape, dtype=torch.float64)
    gradients, batch, dA = run(model, x)
    norms = batch.squared_norms().sum(0)
    gradients.remove()
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # which Opacus does not support
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = opacus.GradSampleModule(model, loss_reduction="sum")
        (theirs(x) * dA).sum().backward()
    samples = {n: p.grad_sample for n, p in theirs.named_parameters()}
    samples = {n: functools.reduce(torch.add, g) if isinstance(g, list) else g for n, g in samples.items()}
    assert relative_error(norms, norm_of(samples)) < TOLERANCE


@pytest.mark.filterwarnings("ignore:Using `torch.compile", "ignore:The .grad attribute")  # of torch itself
@pytest.mark.parametrize("part", [0, 1, None], ids=["a layer", "some layers", "the model"])
def test_compiled_modules(part):
    """The hooks are not traced with the module, which torch.compile cannot do. (Its backend is not needed for that.)"""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    ).double()
    x, plain = torch.randn(4, 6).double(), copy.deepcopy(layers)
    if part is None:
        model = torch.compile(layers, backend="eager")
    else:
        layers[part] = torch.compile(layers[part], backend="eager")
        model = layers
    gradients, batch, dA = run(model, x)
    gradients.remove()
    expected = sample_gradients(plain, (x,), dA)
    assert relative_error(batch.squared_norms().sum(0), norm_of(expected)) < TOLERANCE
