"""Modules without a rule are run again: as the recorded forward pass ran them, leaving no trace, samples apart."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from tests.support.oracle import norm_of, relative_error, sample_gradients
from tests.support.recorded_models import TOLERANCE, check, check_losses, run
from torch import nn
from torch.nn import functional as F

from spectral_dp.gradients import GhostRule, ModelGradients, register_rule
from spectral_dp.gradients import model as model_gradients
from spectral_dp.gradients.rules import rerun as rerun_module
from spectral_dp.gradients.rules.registry import _RULES
from spectral_dp.gradients.uses import Formed, Recorded
from spectral_dp.mechanism.clipping import clip_factors

pytestmark = pytest.mark.filterwarnings("ignore:no rule for", "ignore:torch.func cannot run")


def rows(n=4):
    return torch.randn(n, 6, dtype=torch.float64)


class Own(nn.Module):
    """A module with a parameter of its own, hence without a rule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6) + 2)

    def forward(self, x):
        return x * self.weight


class TestSamplesThatAreLeftOut:
    """``0 * NaN``: a module that is not finite at zero must not see zeros in the place of a sample."""

    class Cosine(Own):
        def forward(self, x):
            return x / x.norm(dim=1, keepdim=True) * self.weight

    class Logarithm(Own):
        def forward(self, x):
            return (x.abs().log() * self.weight).tanh()

    class Deviation(Own):
        def forward(self, x):
            return x / x.std(1, keepdim=True) * self.weight

    def released(self, model, x):
        gradients = ModelGradients(model)
        model(x).square().sum().backward()
        batch = gradients.take()
        norms = batch.squared_norms()
        sums = batch.clipped_sums(clip_factors(norms.sum(0).sqrt(), 1.0))
        gradients.remove()
        return torch.cat([value.flatten() for value in sums.values()])

    @pytest.mark.parametrize("head", [Cosine, Logarithm, Deviation])
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("uses", [1, 2])
    def test_do_not_spread(self, head, bad, uses):
        torch.manual_seed(0)
        layer = head()
        model = nn.Sequential(*[layer] * uses).double()
        x = rows()
        with_bad = torch.cat([x, torch.full((1, 6), bad, dtype=x.dtype)])
        assert relative_error(self.released(model, with_bad), self.released(model, x)) < TOLERANCE

    def test_nor_through_a_rule_of_ones_own(self):
        class Head(self.Cosine):
            pass

        @register_rule(Head)
        class HeadRule(GhostRule[Head]):
            def squared_norms(self, x, dA):
                return self.form(x, dA)["weight"].square().sum(1)

            def clipped_sum(self, x, dA, c):
                return {"weight": c @ self.form(x, dA)["weight"]}

            def form(self, x, dA):
                return {"weight": x / x.norm(dim=1, keepdim=True) * dA}

        try:
            self.test_do_not_spread(Head, math.nan, 1)
        finally:
            del _RULES[Head]

    def test_control_zeros_in_their_place_are_caught(self, monkeypatch):
        """As it was: a sample that is left out was blanked where it went in."""

        def blanked(use, c, counting):
            left_out = (c == 0)[:, None]
            return Recorded(use.rule, *(t.masked_fill(left_out, 0) for t in (use.x, use.dA))).clipped_sums(c)

        monkeypatch.setattr(model_gradients, "_clipped_sums", blanked)
        with pytest.raises(AssertionError):
            self.test_nor_through_a_rule_of_ones_own()


def test_gradients_are_formed_once_during_the_backward_pass():
    """Norm and sum are of the same numbers; what is held is B times the parameters, and nothing else."""
    model = nn.Sequential(Own())
    gradients = ModelGradients(model)
    model(torch.randn(5, 6)).sum().backward()
    (capture,) = gradients._recorder._captures.found[model[0]]
    gradients.remove()
    assert isinstance(capture.kept, Formed)
    assert {name: z.shape for name, z in capture.kept.gradients.items()} == {model[0].weight: (5, 6)}


class Temperature(nn.Module):
    """The scalar parameter of CLIP."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x):
        return x * self.logit_scale.exp()


@pytest.mark.parametrize("uses", [1, 2])
def test_scalar_parameters(uses):
    check(nn.Sequential(nn.Linear(6, 6), *[Temperature()] * uses).double(), rows())


def test_a_module_that_returns_the_loss_is_told_what_to_do():
    class WithLoss(Own):
        def forward(self, x):
            return (x * self.weight).square().mean()

    with pytest.raises(RuntimeError, match="reduction='none'"):
        run(WithLoss(), torch.randn(4, 6))


class TestHooks:
    """What is recorded is the input after hooks of the module and the gradient before them: run again without."""

    def test_of_the_module_itself(self):
        layer = Own()
        layer.register_forward_pre_hook(lambda module, args: (torch.sin(args[0]),))
        layer.register_forward_hook(lambda module, args, out: out.exp())
        check(nn.Sequential(nn.Linear(6, 6), layer).double(), rows())

    def test_that_change_the_input_in_place(self):
        layer = Own()
        layer.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
        check(nn.Sequential(nn.Linear(6, 6), layer).double(), rows())

    def test_with_keywords(self):
        layer = Own()
        layer.register_forward_pre_hook(lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
        check(nn.Sequential(layer).double(), rows())

    def test_of_its_parts_belong_to_the_forward_pass(self):
        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.token, self.inner = nn.Parameter(torch.randn(6)), nn.Linear(6, 3)

            def forward(self, x):
                return self.inner(x + self.token)

        model = Around()
        model.inner.register_forward_pre_hook(lambda module, args: (torch.sin(args[0]),))
        model.inner.register_forward_hook(lambda module, args, out: out.exp())
        check(model.double(), rows())

    def test_control_a_hook_that_runs_twice_is_caught(self, monkeypatch):
        monkeypatch.setattr(
            rerun_module.WithoutHooks, "forward", lambda self, args, kwargs: self.module(*args, **kwargs)
        )
        with pytest.raises(RuntimeError, match="another output"):
            self.test_of_the_module_itself()


class TestSpectralNorm:
    """In training it moves ``u`` and ``v`` and then uses them. Run again, it must use those, and leave them."""

    WRAPS = (nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm)

    def both(self, wrap, passes=1):
        """Recorded norms and sums of a model in training, and those of its weights at that moment, by a loop."""
        torch.manual_seed(0)
        model = nn.Sequential(wrap(nn.Linear(6, 6)), nn.Tanh(), wrap(nn.Linear(6, 2))).double()
        gradients = ModelGradients(model)
        gradients.state.allow(name for name, _ in model.named_buffers())  # as a rehearsal would have found
        x, expected = [rows() for _ in range(passes)], []
        total = 0
        for each in x:
            total = total + model(each).sum()
            unwatched = copy.deepcopy(model).eval()  # moves no vectors
            expected.append(sample_gradients(unwatched, (each,), torch.ones(4, 2, dtype=torch.float64)))
        after = {name: b.clone() for name, b in model.named_buffers()}
        total.backward()
        batch = gradients.take()
        norms, sums = batch.squared_norms().sum(0), batch.clipped_sums(torch.ones(4))
        gradients.remove()
        assert all(torch.equal(b, after[name]) for name, b in model.named_buffers()), "it wrote the buffers"
        names = {p: name for name, p in model.named_parameters()}
        expected = {name: sum(e[name] for e in expected) for name in expected[0]}
        return norms, {names[p]: value for p, value in sums.items()}, expected

    @pytest.mark.parametrize("passes", [1, 2])
    @pytest.mark.parametrize("wrap", WRAPS)
    def test_is_exact(self, wrap, passes):
        """Also where a second forward pass has moved the vectors on before the backward pass."""
        norms, sums, expected = self.both(wrap, passes)
        assert relative_error(norms, norm_of(expected)) < TOLERANCE
        for name, value in sums.items():
            assert relative_error(value, expected[name].sum(0)) < TOLERANCE

    @pytest.mark.parametrize("wrap", WRAPS)
    def test_control_another_power_iteration_is_caught(self, wrap, monkeypatch):
        monkeypatch.setattr("spectral_dp.gradients.rules.fallback.left_as_it_was", lambda _: nullcontext())
        with pytest.raises((AssertionError, RuntimeError)):
            self.test_is_exact(wrap, 1)


class TestNoTrace:
    def test_attributes_are_those_of_the_forward_pass(self):
        """Left from the second run, they would be tensors of torch.func that nobody can read."""

        class Remembering(Own):
            def __init__(self):
                super().__init__()
                self.seen, self.calls = [], 0

            def forward(self, x):
                self.last, self.calls = x * 2, self.calls + 1
                self.seen.append(self.calls)
                return x * self.weight

        model, x = nn.Sequential(Remembering()), torch.randn(4, 6)
        gradients = ModelGradients(model)
        model(x).sum().backward()
        gradients.take_unchecked()[0].clipped_sums(torch.ones(4))
        gradients.remove()
        assert torch.equal(model[0].last, 2 * x)
        assert (model[0].calls, model[0].seen) == (1, [1])
        assert not model[0].last.requires_grad

    @pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
    def test_computed_weights_stay_ordinary_tensors(self):
        layer = torch.nn.utils.weight_norm(nn.Linear(6, 2))
        gradients, _, _ = run(nn.Sequential(layer), torch.randn(4, 6))
        gradients.remove()
        assert torch.isfinite(layer.weight).all()

    def test_cached_parametrizations(self):
        """Inside ``cached()`` a weight that was computed before would not depend on the parameters any more."""
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 2)).double()
        model, x = nn.Sequential(layer), rows()
        expected = sample_gradients(model, (x,), torch.ones(4, 2, dtype=torch.float64))
        gradients = ModelGradients(model)
        with nn.utils.parametrize.cached():
            model(x).sum().backward()
        norms = gradients.take().squared_norms().sum(0)
        gradients.remove()
        assert relative_error(norms, norm_of(expected)) < TOLERANCE


def test_a_forward_pass_that_remembers_is_refused():
    """Run again, it would use what it remembers now, and its gradient would be another one."""

    class Counting(Own):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.weight * self.calls

    class Carrying(Own):
        state = 0.0

        def forward(self, x):
            out = x * self.weight + self.state
            self.state = float(out.detach().mean()) + 1
            return out

    for make in (Counting, Carrying):
        with pytest.raises(RuntimeError, match="earlier forward passes"):
            run(nn.Sequential(make()), torch.randn(4, 6))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch, which says so itself
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_layers(make, dtype):
    """In float64 torch.func cannot run an LSTM for several samples at once: then a loop does."""

    class OwnRecurrent(make):
        def forward(self, x):
            return super().forward(x)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.head = OwnRecurrent(6, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.recurrent(x)[0][:, -1])

    model, x = Last().to(dtype), torch.randn(4, 5, 6, dtype=dtype)
    gradients, batch, dA = run(model, x)
    gradients.remove()
    expected = sample_gradients(model.double(), (x.double(),), dA.double())
    tolerance = TOLERANCE if dtype == torch.float64 else 1e-5
    assert relative_error(batch.squared_norms().sum(0), norm_of(expected)) < tolerance


def test_samples_in_the_second_dimension_are_told_of():
    class OwnAttention(nn.MultiheadAttention):
        def forward(self, x, y, z):
            return super().forward(x, y, z)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = OwnAttention(6, 2), nn.Linear(6, 2)

        def forward(self, x):
            x = x.transpose(0, 1)
            return self.head(self.attention(x, x, x)[0].mean(0))

    with pytest.raises(RuntimeError, match=r"OwnAttention .* make it with batch_first=True"):
        run(Last(), torch.randn(4, 4, 6))


class Branching(Own):
    """A branch on a value, which torch.func cannot run for several samples at once."""

    def forward(self, x):
        return x * self.weight if x.sum() > 0 else x * self.weight.exp()


def test_samples_one_by_one_where_torch_func_fails():
    """A forward pass that branches per *batch* is refused; alone it may."""
    check(nn.Sequential(Branching()).double(), rows().abs())
    with pytest.raises(RuntimeError, match="mixes them"):
        run(nn.Sequential(Branching()).double(), torch.cat([rows(2).abs(), -rows(2).abs()]))


class _Same(torch.autograd.Function):
    """The identity, as torch.func cannot run it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dA):
        return dA


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 6))

    def forward(self, x):
        return torch.sin(_Same.apply(x) @ self.w) @ self.v


def test_one_record_cannot_stop_a_run():
    """So large that rounding decides its output, it is another one alone than in its batch; the others are not."""
    torch.manual_seed(0)
    x = torch.randn(17, 64)
    x[3] *= 1e6
    gradients, batch, _ = run(nn.Sequential(Waves()), x)
    gradients.remove()
    norms = batch.squared_norms().sum(0)
    assert [b for b, norm in enumerate(norms) if not norm.isfinite()] == [3], "it counts as zero"
    sums = batch.clipped_sums(norms.isfinite().double())
    assert all(bool(value.isfinite().all()) for value in sums.values())
    x[:9] *= 1e6
    with pytest.raises(RuntimeError, match="mixes them"):  # the control: many are no accident
        run(nn.Sequential(Waves()), x)


def test_a_huge_record_hides_no_disagreement_of_the_others():
    class Leaning(Waves):
        def forward(self, x):
            return super().forward(x[:, :64]) * x[:, :1] + 1e-2 * x.abs().mean(0)[:6].clamp(max=1)

    x = torch.randn(17, 64)
    x[3] *= 1e4
    with pytest.raises(RuntimeError, match="mixes them"):
        run(nn.Sequential(Leaning()), x)


def test_the_loop_is_announced_once_and_without_numbers():
    class Unrolled(Branching):
        pass

    with pytest.warns(UserWarning, match="one after the other") as caught:
        run(nn.Sequential(Unrolled()), torch.rand(7, 6))[0].remove()
    assert not any("7" in str(w.message) for w in caught)


def test_half_precision_with_frozen_parts_and_buffers():
    class Partly(Own):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.register_buffer("shift", torch.randn(6))

        def forward(self, x):
            return self.frozen(x) * self.weight + self.shift * self.weight

    model, x = nn.Sequential(Partly()).bfloat16(), torch.randn(4, 6).bfloat16()
    gradients, batch, dA = run(model, x)
    gradients.remove()
    expected = sample_gradients(model.double(), (x.double(),), dA.double())
    assert relative_error(batch.squared_norms().sum(0), norm_of(expected)) < 1e-2


def test_messages_do_not_tell_the_realised_batch_size():
    class Second(Own):
        """Samples in the second dimension of the output."""

        def forward(self, x):
            return (x * self.weight).T

    with pytest.raises(RuntimeError, match="cannot be told apart") as error:
        run(nn.Sequential(Second()), torch.randn(7, 6))
    assert "7" not in str(error.value)
    assert error.value.__cause__ is None


class TestInputsThatAreChangedInPlace:
    """The gradients are formed in the middle of a backward pass, which still needs what the module changes."""

    class Rectified(Own):
        def forward(self, x):
            return torch.exp(torch.relu_(x) * self.weight)

    def test_what_the_backward_pass_needs_is_left_alone(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), self.Rectified(), nn.Linear(6, 6)).double()
        check(model, rows())

    def test_control_without_a_copy_autograd_notices(self, monkeypatch):
        monkeypatch.setattr(rerun_module, "_prepared", lambda value, dtype: value.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            self.test_what_the_backward_pass_needs_is_left_alone()


class TestConvolutionsThatShareTheirKernel:
    """A rule has the taps of a kernel in one dimension, a fallback in two."""

    class Shifted(Own):
        def __init__(self, convolution):
            super().__init__()
            self.convolution = convolution

        def forward(self, x):
            return self.convolution(x + self.weight)

    @pytest.mark.parametrize("taps", [1, 3])
    def test_gradients_are_added_tap_by_tap(self, taps):
        torch.manual_seed(0)
        first, second = (nn.Conv2d(4, 4, taps, padding=taps // 2) for _ in range(2))
        second.weight = first.weight
        check(nn.Sequential(first, nn.Tanh(), self.Shifted(second)).double(), torch.randn(4, 4, 6, 6).double())


class Dropping(Own):
    """Dropout of every kind inside of a module that has parameters of its own."""

    def __init__(self, drop):
        super().__init__()
        self.inner, self.drop = nn.Linear(6, 6), drop

    def forward(self, x):
        return self.drop(self.inner(x * self.weight)) * self.weight


def attention_dropout(x):
    q = x.unflatten(1, (2, 3))[:, None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).flatten(1)


def attention_beside_dropout(x):
    q = x.unflatten(1, (2, 3))[:, None]
    return F.dropout(F.scaled_dot_product_attention(q, q, q).flatten(1), 0.5)


def attention_of_folded_heads(x):
    q = x.view(-1, 3, 1)  # two heads of a sample side by side
    return (F.dropout((q @ q.mT).softmax(2), 0.5) @ q).view(-1, 6)


class TestDropout:
    """Each sample gets its own masks of the batch's draw, never others."""

    @pytest.fixture(autouse=True)
    def _nothing_is_held(self, monkeypatch):
        """Else the parameter would be taken care of by itself, and nothing would be run again."""
        monkeypatch.setattr("spectral_dp.gradients.blocks.can_be_held", lambda module: False)

    DROPS = (
        nn.Dropout(0.5),
        nn.Sequential(nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.3)),
        nn.AlphaDropout(0.4),
        lambda x: nn.Dropout2d(0.5)(x.view(-1, 3, 2, 1)).flatten(1),
        lambda x: x + torch.randn_like(x) * x,
        lambda x: x * torch.rand(x.shape, dtype=x.dtype),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
        lambda x: torch.native_dropout(x, 0.5, True)[0],  # what GPUs do
        attention_dropout,
        attention_beside_dropout,
        attention_of_folded_heads,
    )

    @pytest.mark.parametrize("drop", DROPS)
    def test_is_that_of_the_forward_pass(self, drop):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Dropping(drop), nn.Dropout(0.2), nn.Linear(6, 2)).double()
        check_losses(model, lambda model, x: model(x).sin().sum(1), rows(5), draws=True)

    def test_in_a_loop_where_torch_func_fails(self):
        class Both(Dropping):
            def forward(self, x):
                return super().forward(x) if x.sum() > -1e9 else x

        model = nn.Sequential(Both(nn.Dropout(0.5))).double()
        check_losses(model, lambda model, x: model(x).sin().sum(1), rows(5), draws=True)

    def test_of_an_attention_and_an_lstm_inside(self):
        class Inside(Own):
            def __init__(self):
                super().__init__()
                self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)

            def forward(self, x):
                x = torch.stack([x, x.cos(), x.sin()], dim=1) * self.weight
                return self.attention(x, x, x)[0].flatten(1)

        check_losses(Inside().double(), lambda model, x: model(x).sin().sum(1), rows(5), draws=True)

    @pytest.mark.parametrize("drop", [lambda x: nn.Dropout(0.5)(x.T).T, lambda x: F.dropout(x.T, 0.5).T * x])
    def test_samples_in_another_dimension_are_refused(self, drop):
        model = nn.Sequential(Dropping(drop)).double()
        with pytest.raises(RuntimeError, match=r"draws random numbers.*nn.Dropout"):
            run(model, rows(8))

    def test_an_output_changed_in_place_is_refused(self):
        model = nn.Sequential(Dropping(nn.Dropout(0.5)), nn.ReLU(inplace=True))
        with pytest.raises(RuntimeError, match="changed in place"):
            run(model, torch.randn(4, 6))

    def test_control_another_draw_is_refused(self, monkeypatch):
        monkeypatch.setattr("spectral_dp.gradients.recording.random_state.RandomState._restore", lambda self: None)
        with pytest.raises(RuntimeError, match="draws random numbers"):
            self.test_is_that_of_the_forward_pass(nn.Dropout(0.5))

    def test_control_the_masks_of_another_sample_are_refused(self, monkeypatch):
        from spectral_dp.gradients.rules.draws import GivenDraws

        monkeypatch.setattr(GivenDraws, "_part", lambda self, drawn, result: drawn.roll(1, 0))
        with pytest.raises(RuntimeError, match="draws random numbers"):
            self.test_is_that_of_the_forward_pass(nn.Dropout(0.5))
