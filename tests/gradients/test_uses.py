"""What is kept of a layer's use, recorded or formed: the same norms and sums, of the same samples."""

import gc
import weakref

import pytest
import torch
from tests.support.oracle import norm_of, relative_error, sample_gradients
from tests.support.recorded_models import TOLERANCE, check, images, small_cnn
from tests.support.recorded_uses import FILTERS, assert_same, conv_use
from torch import nn
from torch.utils._pytree import tree_leaves

from spectral_dp.gradients import LayerConfig, ModelGradients, Rule
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.gradients.uses import Formed, Recorded, condense
from spectral_dp.layers import BlockCirculantLinear


@pytest.mark.parametrize("filter", FILTERS, ids=repr)
class TestRecordedAndFormed:
    def test_have_the_same_norms_and_sums(self, filter):
        use = conv_use(filter)
        assert_same(use, use.formed())

    @pytest.mark.parametrize(
        "rows", [slice(1, None, 2), torch.tensor([4, 0]), torch.tensor([], dtype=torch.long)], ids=str
    )
    def test_of_some_samples(self, filter, rows):
        use = conv_use(filter)
        if isinstance(rows, slice) or len(rows):
            assert_same(use.select(rows), use.formed().select(rows))
        assert use.formed().select(rows).size == len(use.dA[rows])

    def test_gradients_lie_in_memory_as_they_were_made(self, filter):
        """Their norms and sums are taken without a copy of them, which would be as large as they are."""
        use = conv_use(filter).formed()
        (weight, _) = use.gradients.values()
        assert not weight.is_contiguous()
        assert weight.transpose(-1, -3).is_contiguous()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_uses_that_are_added_are_as_coarse_as_the_coarsest(order):
    use = conv_use(FILTERS[1])
    coarse = Recorded(use.rule, use.x, use.dA.bfloat16())
    both = [use, coarse]
    assert Formed.added([both[i] for i in order]).precision == torch.finfo(torch.bfloat16).eps


def test_gradients_that_are_added_are_held_until_the_sum(monkeypatch):
    """Several backward passes may be taken at once: each forms its own when its norms are asked for."""
    monkeypatch.setattr(KernelConvRule, "forms", lambda *_: False)
    conv = nn.Conv2d(2, 2, 1)
    model = nn.Sequential(conv, nn.Tanh(), conv)
    gradients = ModelGradients(model)
    model(torch.randn(3, 2, 4, 4)).sum().backward()
    batch = gradients.take()
    gradients.remove()
    assert not batch._added
    norms = batch.squared_norms()
    held = weakref.ref(batch._added[0].gradients[conv.bias])
    sums = batch.clipped_sums(norms[0])
    assert held() is None
    torch.testing.assert_close(batch.clipped_sums(norms[0]), sums)


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.ones(width).double()), nn.Parameter(torch.zeros(width).double())


class ScaleRule(Rule[Scale]):
    """Forms its gradients, filtered over the whole weight."""

    def coordinate_shape(self):
        return tuple(self.module.weight.shape)

    def form(self, x, dA):
        return {"weight": self.projection.analyse(x * dA, counted=True), "shift": dA}


def test_a_rule_that_only_forms_may_be_filtered_in_either_order():
    x, dA = torch.randn(2, 5, 8).double()
    for filter in FILTERS[1:]:
        rule = ScaleRule(Scale(8), LayerConfig(filter))
        use = condense(rule, x, dA)
        sums = use.clipped_sums(torch.ones(5).double())
        assert sums[rule.module.weight].shape == rule.coefficient_shape("weight") == (4,)
        everything = (x * dA).square().sum(1) + dA.square().sum(1)
        is_whole = relative_error(use.squared_norms(), everything) < TOLERANCE
        assert is_whole == (filter.order == "clip_then_filter")


def test_a_parameter_that_is_formed_by_no_rule_is_an_error():
    class Forgetful(ScaleRule):
        def form(self, x, dA):
            return {"shift": dA}

    use = condense(Forgetful(Scale(8), LayerConfig()), *torch.randn(2, 5, 8).double())
    with pytest.raises(RuntimeError, match=r"no gradient of \['weight'\]"):
        use.clipped_sums(torch.ones(5))


class TokensThenOne(nn.Module):
    """A block-circulant layer over many tokens, whose gradients are formed, and again over one, where they are not."""

    def __init__(self):
        super().__init__()
        self.layer = BlockCirculantLinear(16, 16, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)).mean(1))


class TestCondensing:
    """What is kept of a layer's use is decided when the backward pass is there."""

    @pytest.fixture(autouse=True)
    def always_form(self, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: True)

    def test_formed_gradients_are_all_that_is_held(self):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 3), nn.GroupNorm(1, 2))
        x = torch.randn(8, 1, 32, 32)
        gradients = ModelGradients(model)
        model(x).square().sum().backward()
        captures = [c for used in gradients._recorder._captures.found.values() for c in used]
        leaves = [leaf for c in captures for leaf in tree_leaves(list(vars(c.kept).values()))]
        held = sum(leaf.numel() for leaf in leaves if torch.is_tensor(leaf))
        gradients.remove()
        assert len(captures) == 3
        assert held == 8 * sum(p.numel() for p in model.parameters())
        assert held < x.numel() / 8

    def test_control_a_gram_layer_holds_its_input(self, monkeypatch):
        monkeypatch.setattr(KernelConvRule, "forms", lambda *_: False)
        with pytest.raises(AssertionError):
            self.test_formed_gradients_are_all_that_is_held()

    def test_uses_of_both_kinds_are_added_before_the_norm(self):
        model = TokensThenOne().double()
        x = torch.randn(4, 64, 16, dtype=torch.float64)
        gradients = ModelGradients(model)
        model(x).sum().backward()
        kinds = [isinstance(c.kept, Formed) for c in gradients._recorder._captures.found[model.layer]]
        gradients.remove()
        assert sorted(kinds) == [False, True]
        check(model, x)

    @pytest.mark.parametrize("make", [small_cnn, lambda: TokensThenOne().double()])
    def test_views_are_added_before_the_norm(self, make):
        model = make()
        is_cnn = isinstance(model, nn.Sequential)
        x = images(6) if is_cnn else torch.randn(6, 64, 16, dtype=torch.float64)
        gradients = ModelGradients(model)
        out = model(x)
        out.sum().backward()
        norms = gradients.take(views=2).squared_norms().sum(0)
        gradients.remove()
        rows = sample_gradients(model, (x,), torch.ones_like(out))
        expected = norm_of({name: g[0::2] + g[1::2] for name, g in rows.items()})
        assert relative_error(norms, expected) < TOLERANCE

    def test_gradients_are_formed_in_full_precision_and_unseen_by_autograd(self):
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))
        gradients = ModelGradients(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(4, 1, 8, 8)).square().sum()
            loss.backward()
        (capture,) = gradients._recorder._captures.found[model[0]]
        gradients.remove()
        z = capture.kept.gradients[model[0].weight]
        assert z.dtype == torch.float32
        assert not z.requires_grad

    def test_the_hooks_do_not_keep_the_gradients_alive(self):
        gradients = ModelGradients(model := nn.Sequential(nn.Conv2d(1, 2, 3)))
        gone = weakref.ref(gradients)
        out = model(torch.randn(2, 1, 8, 8))
        del gradients
        gc.collect()
        assert gone() is None
        out.sum().backward()  # of a graph that outlives them
