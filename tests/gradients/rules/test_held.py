"""Parameters that a module holds itself: they alone are taken care of, and its layers keep their rules."""

import pytest
import torch
from tests.support.recorded_models import check
from tests.support.sharing_models import Sharing, make
from torch import nn

from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.gradients.recording.shared import Shared
from spectral_dp.gradients.rules.embedding import EmbeddingRule
from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.gradients.rules.held import HeldRule
from spectral_dp.gradients.rules.linear import LinearRule
from spectral_dp.mechanism.filters import LowPassFilter


def rules_of(model):
    gradients = ModelGradients(model)
    gradients.remove()
    return {name: type(rule) for block in gradients.blocks for name, rule in block}


def test_layers_beside_the_parameters_keep_their_rules():
    rules = rules_of(make("class token"))
    assert (rules[""], rules["layer"], rules["positions"]) == (HeldRule, LinearRule, EmbeddingRule)


def test_filters_of_layers_beside_the_parameters():
    """When the module went to the fallback as a whole, its layers could not be filtered."""
    gradients = ModelGradients(make("class token"), {"layer": LayerConfig(LowPassFilter(0.5), input_layout=(6,))})
    gradients.model(torch.randn(3, 4, 6).double()).sum().backward()
    sums = gradients.take().clipped_sums(torch.ones(3))
    gradients.remove()
    assert sums[gradients.model.layer.weight].shape == (6, 1, 3)


def test_parameters_in_lists_and_dicts():
    class Listed(Sharing):
        def __init__(self):
            super().__init__()
            self.scales = nn.ParameterList([torch.randn(6), torch.randn(6)])
            self.named = nn.ParameterDict({"shift": torch.randn(6)})

        def forward(self, x):
            return self.out(torch.tanh(x * self.scales[0]) * self.scales[1] + self.named["shift"])

    check(Listed().double(), torch.randn(4, 3, 6).double())


def test_a_parameter_that_another_module_reads():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = make("scaled"), nn.Linear(2, 2)

        def forward(self, x):
            return self.out(self.inner(x * self.inner.gate))

    check(Outer().double(), torch.randn(4, 3, 6).double())


def test_a_parameter_that_two_modules_share():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.layer = make("scaled"), make("scaled"), nn.Linear(2, 6)
            self.b.gate = self.a.gate

        def forward(self, x):
            return self.b(self.layer(self.a(x)))

    check(Tied().double(), torch.randn(4, 3, 6).double())


def test_frozen_parameters_are_left_alone():
    model = make("scaled")
    model.gate.requires_grad_(False)
    gradients = ModelGradients(model)
    seen = []
    model.register_forward_pre_hook(lambda m, _: seen.append(m.gate))
    model(torch.randn(3, 4, 6).double())
    gradients.remove()
    assert not isinstance(seen[0], Shared)
    check(model, torch.randn(4, 3, 6).double())


def test_the_model_has_its_parameters_back_after_a_pass():
    for name in ("scaled", "samples that meet"):  # which is refused
        model = make(name)
        before = dict(model.named_parameters())
        gradients = ModelGradients(model)
        try:
            model(torch.randn(3, 4, 6).double())
        except RuntimeError:
            assert name != "scaled"
        assert all(p is before[n] for n, p in model.named_parameters())
        gradients.remove()


def test_so_it_has_after_an_interruption():
    class Interrupted(Sharing):
        def forward(self, x):
            raise KeyboardInterrupt

    model = Interrupted()
    before = dict(model.named_parameters())
    gradients = ModelGradients(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(3, 4, 6))
    gradients.discard()
    assert all(p is before[n] for n, p in model.named_parameters())
    gradients.remove()


def test_a_trial_leaves_no_trace():
    class Counting(Sharing):
        calls = 0.5

        def forward(self, x):
            self.calls = self.calls + 1.0
            return self.out(self.layer(x) * self.gate)

    torch.manual_seed(0)
    model, x = Counting().double(), torch.randn(5, 4, 6).double()
    gradients = ModelGradients(model)
    state = torch.get_rng_state()
    model(x)
    assert model.calls == 1.5, "the pass itself, not the trial"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in model.modules())
    gradients.remove()


def test_without_tensors_the_number_of_samples_is_asked_for():
    class Named(Sharing):
        def forward(self, words):
            return self.out(torch.randn(len(words), 6) * self.gate)

    gradients = ModelGradients(model := Named())
    with pytest.raises(RuntimeError, match="pass the batch as tensors"):
        model(["a", "b"])
    gradients.remove()


@pytest.mark.filterwarnings("ignore:no rule for")
def test_modules_of_torch_and_compiled_ones_are_run_again_as_before():
    assert rules_of(nn.Sequential(nn.MultiheadAttention(4, 2)))["0"] is not HeldRule
    model = make("scaled")
    model.layer = torch.compile(model.layer, backend="eager")
    assert rules_of(model)[""] is FallbackRule


@pytest.mark.filterwarnings("ignore:no rule for")
def test_a_module_that_returns_a_table():
    """As the relative position bias of Swin: it has no layers and is given no samples, and is run again once."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 6))

        def forward(self):
            return torch.sin(self.table)[None]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.out = Table(), nn.Linear(6, 2)

        def forward(self, x):
            return self.out(torch.tanh(x + self.bias()))

    for samples in (1, 2, 4, 5):
        check(Outer().double(), torch.randn(samples, 4, 6).double())


def test_a_parameter_that_a_module_holds_by_two_names():
    """The second name gave a plain gradient, which was in no norm."""

    def forward(m, x):
        return m.out(torch.tanh(m.layer(x) * m.gate + m.other_name))

    torch.manual_seed(0)
    model = type("Model", (Sharing,), {"forward": forward})()
    model.other_name = model.gate
    check(model.double(), torch.randn(4, 3, 6).double())
    assert model.other_name is model.gate
    assert model.gate.grad is None


def test_a_model_that_calls_itself():
    """The inner call ended the pass, so what came after it had plain gradients."""

    def forward(m, x):
        inner = m(x[:, :2]).mean(1, keepdim=True) if x.shape[1] > 2 else 0
        return m.out(torch.tanh(m.layer(x) * m.gate)) + inner

    torch.manual_seed(0)
    model = type("Model", (Sharing,), {"forward": forward})().double()
    check(model, torch.randn(4, 3, 6).double())
    assert model.gate.grad is None


def test_evaluation_after_an_interruption():
    """With another number of samples than the batch that was interrupted."""

    def forward(m, x):
        h = m.layer(x) * m.gate
        if m.is_interrupted:
            raise KeyboardInterrupt
        return m.out(h)

    model = type("Model", (Sharing,), {"forward": forward, "is_interrupted": False})()
    gradients = ModelGradients(model)
    x = torch.randn(5, 3, 6)
    model(x)
    model.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model.is_interrupted = False
    with torch.no_grad():
        out = model(x[:2])
    assert type(model.gate) is nn.Parameter
    gradients.remove()
    torch.testing.assert_close(out, model(x[:2]).detach())
