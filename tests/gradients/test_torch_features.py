"""What PyTorch offers around a model: with each, gradients are those of the loop over samples, or there is an error.

The oracle is the same model without the feature where the feature changes nothing (checkpoints, compilation, memory
format), so that an error in how the feature and the recorder meet cannot be on both sides.
"""

import copy

import pytest
import torch
from tests.support.oracle import norm_of, relative_error, sample_gradients
from tests.support.private_runs import setup
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from spectral_dp.gradients import ModelGradients

TOLERANCE = 1e-9


def check(model, x, *, forward=None, plain=None, tolerance=TOLERANCE):
    """Norms and clipped sums through ``forward`` (the model, if not given) are those of a loop over ``plain``."""
    gradients = ModelGradients(model)
    out = (forward or model)(x)
    dA = torch.randn_like(out)
    (out * dA).sum().backward()
    batch = gradients.take()
    c = torch.rand(len(x), dtype=torch.float64)
    norms, sums = batch.squared_norms().sum(0), batch.clipped_sums(c)
    sums = {p: gradients.gradient(p, value) for p, value in sums.items()}
    gradients.remove()
    assert all(p.grad is None for p in model.parameters()), "a plain gradient, which nobody clips"
    expected = sample_gradients(plain or copy.deepcopy(model), (x.detach(),), dA)
    assert any(bool(g.any()) for g in expected.values())
    assert relative_error(norms, norm_of(expected).double()) < tolerance
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for (p, value), name in zip(sums.items(), names, strict=True):
        of_plain = name.removeprefix("_orig_mod.").removeprefix("module.") if plain is not None else name
        assert p is model.get_parameter(name)
        total = torch.tensordot(c.to(value.dtype), expected[of_plain].to(value.dtype), dims=1)
        assert relative_error(value, total) < tolerance


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3)
    ).double()


def cnn(inplace=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace), nn.GroupNorm(2, 4), nn.LeakyReLU(inplace=inplace),
        nn.Conv2d(4, 4, 3, stride=2), nn.Hardswish(inplace), nn.Flatten(), nn.Linear(16, 3), nn.ELU(inplace=inplace),
    ).double()  # fmt: skip


def rows(n=5):
    return torch.randn(n, 6, dtype=torch.float64)


def images(n=5):
    return torch.randn(n, 2, 6, 6, dtype=torch.float64)


class Checkpointed(nn.Module):
    """Layers before, within and behind a checkpoint, and a checkpoint within it."""

    def __init__(self, use_reentrant, nested=False):
        super().__init__()
        self.first, self.body, self.head = nn.Linear(6, 6).double(), mlp(), nn.Linear(3, 2).double()
        self.use_reentrant, self.nested = use_reentrant, nested

    def forward(self, x):
        within = self._halves if self.nested else self.body
        return self.head(torch.tanh(self._checkpoint(within, self.first(x))))

    def _halves(self, x):
        return self.body[3:](self._checkpoint(self.body[:3], x))

    def _checkpoint(self, function, x):
        if self.use_reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.use_reentrant)


class TestCheckpoint:
    """Activations that are computed again in the backward pass are those of the same samples: clipped together."""

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("nested", [False, True])
    def test_a_part_of_the_model(self, use_reentrant, nested):
        model, plain = Checkpointed(use_reentrant, nested), Checkpointed(None, nested)
        plain.load_state_dict(model.state_dict())
        check(model, rows(), plain=plain)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_a_layer_within_and_behind_it(self, use_reentrant):
        """Norms of the two uses must not be taken apart."""
        model, plain = Checkpointed(use_reentrant), Checkpointed(None)
        for shared in (model, plain):
            shared.body[4] = nn.Linear(8, 6).double()
            shared.body[5] = shared.head = shared.first
        plain.load_state_dict(model.state_dict())
        check(model, rows(), plain=plain)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_a_sequence(self, use_reentrant):
        model = mlp()
        x = rows().requires_grad_()  # without it, reentrant checkpoints train nothing, in plain PyTorch as well
        check(model, x, forward=lambda x: checkpoint_sequential(model, 3, x, use_reentrant=use_reentrant))

    def test_dropout_in_it_has_the_same_mask(self):
        layer, plain = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4)).double(), nn.Linear(6, 4).double()
        plain.load_state_dict(layer[1].state_dict())
        x, seen = rows().requires_grad_(), []
        layer[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        for use_reentrant in (False, True):
            gradients = ModelGradients(layer)
            checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
            norms = gradients.take().squared_norms().sum(0)
            gradients.remove()
            expected = sample_gradients(plain, (seen[-1],), torch.ones(5, 4).double())
            assert relative_error(norms, norm_of(expected)) < TOLERANCE

    @pytest.mark.filterwarnings("ignore:no rule for", "ignore:torch.func cannot run", "ignore:None of the inputs")
    def test_within_a_module_without_a_rule(self):
        class Scaled(nn.Module):
            def __init__(self, use_reentrant):
                super().__init__()
                self.scale, self.body = nn.Parameter(torch.ones(6).double()), mlp()
                self.use_reentrant = use_reentrant

            def forward(self, x):
                return checkpoint(self.body, x * self.scale, use_reentrant=self.use_reentrant)

        check(Scaled(False), rows())
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            check(Scaled(True), rows())

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_a_record_moves_the_sum_by_its_bound(self, use_reentrant):
        """Clipped apart, the layers within a reentrant checkpoint would add a second bound."""
        model, x = Checkpointed(use_reentrant), 1e3 * rows()
        gradients = ModelGradients(model)
        model(x).sum().backward()
        (batch,) = gradients.take_all()
        norms = batch.squared_norms().sum(0).sqrt()
        sums = batch.clipped_sums((torch.arange(5) == 2) / norms)
        gradients.remove()
        assert torch.cat([s.flatten() for s in sums.values()]).norm() == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore:Using `torch.compile", "ignore:The .grad attribute")  # of torch itself
class TestCompile:
    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.parametrize(("make", "x"), [(mlp, rows()), (cnn, images())], ids=["mlp", "cnn"])
    def test_the_model(self, make, x):
        """``aot_eager`` traces forward and backward pass as the default does, and needs no compiler."""
        layers = make()
        check(torch.compile(layers, backend="aot_eager"), x, plain=copy.deepcopy(layers))

    def test_the_model_before_it_is_made_private(self):
        """What was compiled without taps must not be run when there are some."""
        layers = mlp()
        compiled = torch.compile(layers, backend="aot_eager")
        compiled(rows()).sum().backward()
        compiled.zero_grad()
        check(compiled, rows(), plain=copy.deepcopy(layers))

    def test_after_the_taps_are_gone(self):
        layers, x = mlp(), rows()
        compiled = torch.compile(layers, backend="aot_eager")
        check(compiled, x, plain=copy.deepcopy(layers))
        compiled(x).sum().backward()
        ours = [p.grad.clone() for p in layers.parameters()]
        layers.zero_grad()
        layers(x).sum().backward()
        torch.testing.assert_close(ours, [p.grad for p in layers.parameters()])

    @pytest.mark.filterwarnings("ignore:no rule for")
    def test_a_module_without_a_rule(self):
        layers = nn.Sequential(nn.Linear(6, 6), nn.PReLU(6), Offset(6), nn.Linear(6, 2)).double()
        check(torch.compile(layers, backend="aot_eager"), rows(), plain=copy.deepcopy(layers))

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
    def test_the_default_backend(self):
        layers = cnn()
        check(torch.compile(layers), images(), plain=copy.deepcopy(layers))


class Offset(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.offset = nn.Parameter(torch.randn(n))

    def forward(self, x):
        return torch.tanh(x + self.offset)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def symmetric(layer):
    parametrize.register_parametrization(layer, "weight", Symmetric())


def spectral_norm(layer):
    parametrizations.spectral_norm(layer).eval()  # the loop would move its vectors at every sample


PARAMETRIZATIONS = [parametrizations.weight_norm, spectral_norm, parametrizations.orthogonal, symmetric]


@pytest.mark.filterwarnings("ignore:no rule for", "ignore:torch.func cannot run")
@pytest.mark.parametrize("wrap", PARAMETRIZATIONS, ids=lambda wrap: wrap.__name__)
class TestParametrize:
    @pytest.mark.parametrize("place", [0, 2], ids=["first", "later"])
    def test_of_a_dense_layer(self, wrap, place):
        model = mlp()
        if wrap is symmetric:
            model[0], model[1] = nn.Linear(6, 6).double(), nn.Sequential(nn.Tanh(), nn.Linear(6, 8).double())
        wrap(model[place])
        check(model, rows())

    def test_cached(self, wrap):
        model = mlp()
        wrap(model[2])

        def forward(x):
            with parametrize.cached():
                return model(x)

        check(model, rows(), forward=forward)

    def test_its_weight_is_not_used_elsewhere(self, wrap):
        """``F.linear(x, layer.weight)`` leaves a gradient that nobody clips, which no step lets through."""
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 3))
        wrap(model[1])
        _, private, optimizer, loader = setup(model, rehearsal=False)
        x, y = next(iter(loader))
        h = F.linear(x.flatten(1), private[1].weight, private[1].bias)
        F.cross_entropy(private[2](h), y).backward()
        with pytest.raises(RuntimeError, match="use parameters through their layers only"):
            optimizer.step()


@pytest.mark.filterwarnings("ignore:no rule for")
def test_parametrized_convolution():
    model = cnn()
    parametrizations.weight_norm(model[0])
    check(model, images())


class TestAutocast:
    """Output gradients arrive in bfloat16; norms and sums of them are exact in float32."""

    @pytest.mark.parametrize(("make", "x"), [(mlp, rows(32)), (cnn, images(32))], ids=["mlp", "cnn"])
    def test_bfloat16(self, make, x):
        """Beside the plain model in autocast the difference is rounding of the loop's, in bfloat16."""

        class Autocast(nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module

            def forward(self, x):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.module(x).float()

        check(Autocast(make().float()), x.float(), tolerance=2e-2)

    def test_half_precision_throughout(self):
        check(mlp().bfloat16(), rows(32).bfloat16(), tolerance=2e-2)


class TestMemoryFormat:
    def test_channels_last(self):
        model = cnn().to(memory_format=torch.channels_last)
        check(model, images().to(memory_format=torch.channels_last), plain=cnn())

    @pytest.mark.parametrize("of", ["model", "input"])
    def test_of_one_only(self, of):
        model, x = cnn(), images()
        if of == "model":
            model = model.to(memory_format=torch.channels_last)
        else:
            x = x.to(memory_format=torch.channels_last)
        check(model, x, plain=cnn())

    def test_transposed_inputs(self):
        check(nn.Linear(6, 3).double(), torch.randn(6, 5).double().T)
        check(nn.Linear(6, 3).double(), torch.randn(4, 6, 5).double().permute(2, 0, 1))


@pytest.mark.parametrize("inplace", [True, False])
def test_activations_in_place(inplace):
    check(cnn(inplace), images(), plain=cnn(inplace=False))


def test_a_change_in_place_of_what_a_layer_has_used():
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

        def forward(self, x):
            h = torch.tanh(self.first(x))
            y = self.second(h)
            h.mul_(2)
            return y + h

    with pytest.raises(RuntimeError, match=r"(changed|modified).* (in place|inplace)"):
        check(Changed(), rows())


def test_data_parallel():
    layers = cnn()
    check(nn.DataParallel(layers), images(), plain=copy.deepcopy(layers))


class TwoLayers(nn.Module):
    """Something between, or around, two layers."""

    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()
        self._forward = forward

    def forward(self, x):
        return self._forward(self, x)


class TestFunctionTransforms:
    def test_without_trained_parameters(self):
        check(TwoLayers(lambda m, x: m.second(torch.vmap(torch.tanh)(m.first(x)))), rows())

    def test_of_a_frozen_layer(self):
        model = TwoLayers(lambda m, x: m.second(torch.vmap(m.first)(x)))
        model.first.requires_grad_(False)
        check(model, rows())

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")  # of torch itself
    @pytest.mark.parametrize(
        "forward",
        [
            lambda m, x: m.second(torch.vmap(m.first)(x)),
            lambda m, x: m.second(torch.func.grad(lambda v: m.first(v).tanh().sum())(x)),
            lambda m, x: m.second(torch.func.jvp(m.first, (x,), (x,))[1]),
        ],
        ids=["vmap", "grad", "jvp"],
    )
    def test_of_a_trained_layer_are_refused(self, forward):
        with pytest.raises(RuntimeError, match="call it on the whole batch outside of the transform"):
            check(TwoLayers(forward), rows())

    def test_of_the_whole_model_are_refused_unless_it_is_frozen(self):
        model, x = TwoLayers(lambda m, x: m.second(m.first(x))), rows()
        expected = model(x)
        gradients = ModelGradients(model)
        with pytest.raises(RuntimeError, match="call it on the whole batch outside of the transform"):
            torch.vmap(model)(x)
        model.requires_grad_(False)
        torch.testing.assert_close(torch.vmap(model)(x), expected)
        gradients.remove()

    def test_functional_call_of_its_own_parameters(self):
        def forward(m, x):
            return m.second(torch.func.functional_call(m.first, dict(m.first.named_parameters()), (x,)).tanh())

        check(TwoLayers(forward), rows())

    @pytest.mark.parametrize("of", [lambda p: 2 * p, lambda p: (2 * p).detach(), lambda p: nn.Parameter(2 * p)])
    def test_functional_call_of_others_is_refused(self, of):
        """Detached, they would leave no trace: the layer would be trained although the loss does not depend on it."""

        def forward(m, x):
            others = {name: of(p) for name, p in m.first.named_parameters()}
            return m.second(torch.func.functional_call(m.first, others, (x,)).tanh())

        with pytest.raises(RuntimeError, match=r"compute its weight by torch\.nn\.utils\.parametrize"):
            check(TwoLayers(forward), rows())


class TestGradientsOfInputs:
    def test_an_attack_on_the_inputs_is_no_pass_of_the_samples(self):
        """As in adversarial training: its own pass, by ``torch.autograd.grad``, is not part of the loss."""
        layers = mlp()

        def attacked(x):
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(layers(x).square().sum(), x)
            return layers((x + 0.1 * slope.sign()).detach())

        check(layers, rows(), forward=attacked, plain=_Calls(copy.deepcopy(layers), attacked_by=0.1))

    def test_a_gradient_penalty_is_refused(self):
        layers = mlp()

        def penalised(x):
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(layers(x).sum(), x, create_graph=True)
            return slope.square().sum(1, keepdim=True)

        with pytest.raises(RuntimeError, match="gradient penalty"):
            check(layers, rows(), forward=penalised)

    def test_a_backward_pass_of_some_parameters_is_no_step(self):
        _, model, optimizer, loader = setup(rehearsal=False)
        x, y = next(iter(loader))
        F.cross_entropy(model(x), y).backward(inputs=list(model.parameters()))
        with pytest.raises(RuntimeError, match="fewer samples than the loader handed out"):
            optimizer.step()


class _Calls(nn.Sequential):
    def __init__(self, layers, attacked_by):
        super().__init__(*layers)
        self._size = attacked_by

    def forward(self, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).square().sum(), x)
        return super().forward((x + self._size * slope.sign()).detach())


class LastToken(nn.Module):
    """A layer whose rule takes over its backward pass, between others, maybe in a checkpoint or behind an attack."""

    def __init__(self, layer, use_reentrant=None, attack=0.0):
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(6, 6), layer, nn.Linear(6, 3)
        self.use_reentrant, self.attack = use_reentrant, attack

    def forward(self, x):
        if self.attack:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self._logits(x).square().sum(), x)
            x = (x + self.attack * slope.sign()).detach()
        return self._logits(x)

    def _logits(self, x):
        h = self.first(x)
        if self.use_reentrant is None:
            return self.head(self._mixed(h)[:, -1])
        h = checkpoint(self._mixed, h, use_reentrant=self.use_reentrant)
        return self.head(h[:, -1])

    def _mixed(self, h):
        return (self.layer(h, h, h) if isinstance(self.layer, nn.MultiheadAttention) else self.layer(h))[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.MultiheadAttention])
class TestLayersThatTakeOverTheBackwardPass:
    def model(self, kind, **options):
        torch.manual_seed(0)
        layer = kind(6, 2, batch_first=True) if kind is nn.MultiheadAttention else kind(6, 6, batch_first=True)
        return LastToken(layer, **options).double()

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_in_a_checkpoint(self, kind, use_reentrant):
        x = torch.randn(5, 4, 6).double()
        check(self.model(kind, use_reentrant=use_reentrant), x, plain=self.model(kind))

    def test_behind_an_attack(self, kind):
        check(self.model(kind, attack=0.1), torch.randn(5, 4, 6).double())


class TestPartsWithoutGradients:
    """A part under ``no_grad`` has the gradient that plain PyTorch gives it: none."""

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_of_the_forward_pass(self, context):
        def forward(m, x):
            with context():
                h = m.first(x)
            return m.second(h.clone().tanh())

        check(TwoLayers(forward), rows())

    def test_detached(self):
        check(TwoLayers(lambda m, x: m.second(m.first(x).detach().tanh())), rows())

    def test_a_layer_with_and_without(self):
        def forward(m, x):
            with torch.no_grad():
                weight = m.first(x).sigmoid()
            return m.second(m.first(x) * weight)

        check(TwoLayers(forward), rows())

    def test_an_enabled_part_of_a_disabled_pass(self):
        def forward(m, x):
            with torch.no_grad():
                h = m.first(x)
                with torch.enable_grad():
                    return m.second(h)

        check(TwoLayers(forward), rows())
