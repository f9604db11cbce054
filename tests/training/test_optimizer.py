"""Checks A to C of the privacy proof through the real step: hooks, rules, clipping, noise, filter, inverse."""

import functools
import math
import warnings
import weakref

import pytest
import torch
from tests.support import broken_steps
from tests.support.privacy_checks import (
    MAX_NORM,
    SIGMA,
    ScriptedNoise,
    largest_movement,
    noise_law_p_values,
    true_noise_multiplier,
)
from torch import nn

from spectral_dp.gradients import GhostRule, LayerConfig, ModelGradients, register_rule
from spectral_dp.gradients.rules.registry import _RULES
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.clipping import AutomaticClipping, FlatClipping, NonFiniteWarning, PerLayerClipping
from spectral_dp.mechanism.filters import AdaptiveFilter, LowPassFilter, PaperBandFilter, ShapedFilter
from spectral_dp.mechanism.noise import SeededNoise
from spectral_dp.relations import Relation
from spectral_dp.training.optimizer import PrivateOptimizer
from spectral_dp.training.sampling import PhysicalBatch

EXPECTED = 4.0
LENGTHS = {"dense": 4, "conv": 6, "circulant": 8}
N = sum(LENGTHS.values())


class ThreeLayers(nn.Module):
    """The gradient of a sample is the sample itself, one stretch of it in each layer: any signal can be put in."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(LENGTHS["dense"], 1, bias=False)
        self.conv = nn.Conv1d(1, 1, LENGTHS["conv"], bias=False)
        self.circulant = BlockCirculantLinear(
            LENGTHS["circulant"], LENGTHS["circulant"], LENGTHS["circulant"], bias=False
        )

    def forward(self, x):
        a, b, c = x.split(list(LENGTHS.values()), dim=1)
        return self.dense(a)[:, 0] + self.conv(b[:, None]).sum((1, 2)) + self.circulant(c)[:, 0]


FILTERS = {
    "plain": {},
    "filtered": {"conv": LayerConfig(LowPassFilter(0.5)), "circulant": LayerConfig(LowPassFilter(0.5))},
    "paper": {
        "conv": LayerConfig(PaperBandFilter(0.5, order="clip_then_filter"), support="signal", input_layout=(1, 6)),
        "circulant": LayerConfig(PaperBandFilter(0.5, order="clip_then_filter")),
    },
    "shaped": {
        "conv": LayerConfig(ShapedFilter(torch.linspace(2, 0.3, 6))),
        "circulant": LayerConfig(LowPassFilter(0.3)),
    },
}
CLIPPINGS = {
    "flat": FlatClipping(MAX_NORM),
    "per layer": PerLayerClipping(MAX_NORM),
    "per layer, optimal": PerLayerClipping(MAX_NORM, allocation="optimal"),
    "automatic": AutomaticClipping(MAX_NORM),
}


def private_model(filters, clipping, **options):
    model = ThreeLayers().double()
    return model, PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        ModelGradients(model, FILTERS[filters]),
        clipping=CLIPPINGS.get(clipping, clipping),
        noise_multiplier=SIGMA,
        expected_batch_size=EXPECTED,
        noise=ScriptedNoise(),
        loss_reduction="sum",
        **options,
    )


@pytest.fixture
def one_step():
    """The released sum of one logical step, in the parameters' domain, all layers in one vector.

    One model makes all steps of a test that have the same settings: to make it private takes longer than a step.
    """
    made = {}

    def release(samples, noise, *, filters="plain", clipping="flat", **options):
        key = (filters, clipping, *options.items())
        if key not in made:
            made[key] = private_model(filters, clipping, **options)
        model, optimizer = made[key]
        optimizer.noise = noise
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)
            model(samples).sum().backward()
            optimizer.step()
        optimizer.resume(0)
        return torch.cat([p.grad.flatten() for p in model.parameters()]) * EXPECTED

    yield release
    for _, optimizer in made.values():
        optimizer.gradients.remove()


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_every_direction_of_every_layer_carries_the_claimed_noise_jointly(one_step, filters, clipping):
    """Check A, jointly over the layers: per-layer noise that forgot the other layers' shares would fail here."""
    measured = true_noise_multiplier(functools.partial(one_step, filters=filters, clipping=clipping), N, batch=3)
    assert measured >= SIGMA
    # Attained where one bound holds for everything; per layer only by a record that is clipped in every layer.
    if clipping == "flat":
        assert measured == pytest.approx(SIGMA, rel=1e-4)


def test_control_per_layer_noise_without_the_other_layers_is_caught(one_step):
    forgetful = functools.partial(one_step, clipping=broken_steps.ForgetfulClipping(MAX_NORM))
    assert true_noise_multiplier(forgetful, N, batch=3) < 0.7 * SIGMA


@pytest.mark.parametrize("mistake", broken_steps.MISTAKES)
def test_control_broken_noise_is_caught_through_the_whole_step(one_step, mistake):
    def broken(samples, noise):
        return one_step(samples, broken_steps.BrokenNoise(mistake, noise))

    assert true_noise_multiplier(broken, N, batch=3) < 0.95 * SIGMA


def test_control_a_realised_divisor_is_caught_through_the_whole_step(one_step):
    def realised(samples, noise):
        return one_step(samples, noise) * EXPECTED / max(len(samples), 1)

    assert largest_movement(realised, N) > 1.5 * MAX_NORM


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_no_record_moves_the_release_further_than_the_bound(one_step, clipping):
    """Check B; without a filter the release with noise off is the clipped sum itself."""
    assert largest_movement(functools.partial(one_step, clipping=clipping), N) <= MAX_NORM * (1 + 1e-9)


@pytest.mark.parametrize("relation", list(Relation))
def test_noise_law(one_step, relation):
    """Check C, with power; and noise that differs between layers and steps."""
    noise = SeededNoise(0, reproducibility_over_privacy=True)
    zero = torch.zeros(2, N, dtype=torch.float64)
    draws = torch.stack([one_step(zero, noise, relation=relation) for _ in range(300)])
    scale = SIGMA * MAX_NORM * (2 if relation is Relation.REPLACE_ONE else 1)
    assert min(noise_law_p_values(draws, scale)) > 1e-4
    for wrong in (2 / 3, 3 / 2):
        assert max(noise_law_p_values(draws, scale * wrong)) < 1e-4
    correlation = torch.corrcoef(draws.T) - torch.eye(N)
    assert float(correlation.abs().max()) < 0.25


def test_optimal_allocation_adds_less_noise_in_total():
    sizes = [10, 100_000]
    noise = {name: PerLayerClipping((1.0, 1.0), name).noise_bounds(sizes) for name in ("uniform", "optimal")}
    total = {name: 10 * b[0] ** 2 + 100_000 * b[1] ** 2 for name, b in noise.items()}
    assert total["optimal"] < 0.6 * total["uniform"]
    assert sum((1 / b) ** 2 for b in noise["optimal"]) == pytest.approx(1)  # the same privacy


class TestOneStep:
    def make(self, model=None, **options):
        model = model or nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        options = {"clipping": FlatClipping(0.3), "noise_multiplier": 1.0, "expected_batch_size": 4.0} | options
        options.setdefault("noise", ScriptedNoise())
        optimizer = PrivateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), ModelGradients(model), **options)
        return model, optimizer

    def loss(self, model, x):
        return model(x).square().sum(1)

    def test_without_clipping_and_noise_it_is_plain_sgd(self):
        x = torch.randn(4, 6, dtype=torch.float64)
        model, optimizer = self.make(clipping=FlatClipping(math.inf), noise_multiplier=0.0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        plain.load_state_dict(model.state_dict())
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            self.loss(model, x).mean().backward()
            with pytest.warns(RuntimeWarning, match="not private"):
                optimizer.step()
            sgd.zero_grad()
            self.loss(plain, x).mean().backward()
            sgd.step()
        optimizer.gradients.remove()
        torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-12, atol=1e-12)

    def test_mean_and_sum_losses_give_the_same_release(self):
        x = torch.randn(3, 6, dtype=torch.float64)
        released = []
        model = None
        for reduction in ("mean", "sum"):
            model, optimizer = self.make(model, loss_reduction=reduction)
            optimizer.zero_grad()
            getattr(self.loss(model, x), reduction)().backward()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            released.append([p.grad.clone() for p in model.parameters()])
            optimizer.gradients.remove()
            for p, old in zip(model.parameters(), before, strict=True):
                p.data.copy_(old)
        torch.testing.assert_close(*released)

    def test_the_divisor_is_public(self):
        """With noise off and two samples the sum is divided by the expected four."""
        x = torch.randn(2, 6, dtype=torch.float64) * 100
        model, optimizer = self.make()
        self.loss(model, x).mean().backward()
        optimizer.step()
        optimizer.gradients.remove()
        assert float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) <= 2 * 0.3 / 4

    def test_views_are_averaged_before_clipping(self):
        """Clipping each view by itself would let a sample count once per view."""
        x = torch.randn(2, 6, dtype=torch.float64) * 10
        views = x.repeat_interleave(3, 0)
        released = []
        model = None
        for data, k in ((x, 1), (views, 3)):
            model, optimizer = self.make(model, views=k)
            optimizer.zero_grad()
            optimizer.original_optimizer.param_groups[0]["lr"] = 0.0
            self.loss(model, data).mean().backward()
            optimizer.step()
            released.append([p.grad.clone() for p in model.parameters()])
            optimizer.gradients.remove()
        torch.testing.assert_close(*released)

    @pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
    def test_any_optimizer_and_a_scheduler(self, make):
        model = nn.Linear(6, 3)
        original = make([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1)
        optimizer = PrivateOptimizer(
            original,
            ModelGradients(model),
            clipping=FlatClipping(1.0),
            noise_multiplier=1.0,
            expected_batch_size=4.0,
            noise=ScriptedNoise(),
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        before = model.weight.detach().clone()
        model(torch.randn(4, 6)).square().sum(1).mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.gradients.remove()
        assert [g["lr"] for g in original.param_groups] == [0.05, 0.25]
        assert not torch.equal(model.weight, before)

    def test_non_finite_samples_count_as_zero_and_are_reported(self):
        x = torch.randn(3, 6, dtype=torch.float64)
        x[1, 0] = math.nan
        model, optimizer = self.make()
        self.loss(model, x).sum().backward()
        with pytest.warns(NonFiniteWarning, match="some samples are not finite"):
            optimizer.step()
        optimizer.gradients.remove()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())

    def test_stepping_twice_without_a_backward_pass_is_refused(self):
        model, optimizer = self.make()
        self.loss(model, torch.randn(2, 6, dtype=torch.float64)).mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="after 0 backward passes"):
            optimizer.step()
        optimizer.gradients.remove()

    @pytest.mark.parametrize("set_to_none", [True, False])
    def test_uses_of_a_parameter_outside_its_layer_are_refused(self, set_to_none):
        """Plain autograd gives them an un-clipped, un-noised gradient; silently dropping it would be no better."""
        model, optimizer = self.make()
        x = torch.randn(2, 6, dtype=torch.float64)
        self.loss(model, x).mean().backward()
        optimizer.step()
        self.loss(model, x).mean().backward()
        optimizer.step()  # without zero_grad: what lies there has been released
        optimizer.zero_grad(set_to_none=set_to_none)
        (self.loss(model, x).mean() + nn.functional.linear(x, model[0].weight).mean()).backward()
        with pytest.raises(RuntimeError, match=r"\(5, 6\).*outside its layer"):
            optimizer.step()
        optimizer.gradients.remove()

    def test_such_a_use_is_noticed_without_zero_grad_too(self):
        model, optimizer = self.make()
        x = torch.randn(2, 6, dtype=torch.float64)
        self.loss(model, x).mean().backward()
        optimizer.step()
        (self.loss(model, x).mean() + model[0].weight.square().sum()).backward()
        with pytest.raises(RuntimeError, match="weight_decay"):
            optimizer.step()
        optimizer.gradients.remove()

    def test_adaptive_filters_see_what_is_released_and_nothing_else(self):
        model = nn.Conv1d(1, 2, 8)
        filter = AdaptiveFilter()
        seen = []
        filter.observe = lambda released, std: seen.append((released.clone(), std))
        gradients = ModelGradients(model, {"": LayerConfig(filter)})
        optimizer = PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            gradients,
            clipping=FlatClipping(1.0),
            noise_multiplier=2.0,
            expected_batch_size=1.0,
            noise=SeededNoise(0, reproducibility_over_privacy=True),
        )
        model(torch.randn(3, 1, 9)).square().sum((1, 2)).mean().backward()
        optimizer.step()
        gradients.remove()
        ((released, std),) = seen
        assert std == 2.0
        torch.testing.assert_close(gradients.gradient(model.weight, released), model.weight.grad)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"loss_reduction": "none"}, "'mean' or 'sum'"),
            ({"expected_batch_size": 0.0}, "positive"),
            ({"views": 0}, "at least 1"),
        ],
    )
    def test_bad_options(self, wrong, message):
        with pytest.raises(ValueError, match=message):
            self.make(**wrong)

    def test_parameters_of_another_model_are_refused(self):
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        with pytest.raises(ValueError, match="no trained parameter"):
            PrivateOptimizer(
                torch.optim.SGD(other.parameters(), lr=0.1),
                ModelGradients(model),
                clipping=FlatClipping(1.0),
                noise_multiplier=1.0,
                expected_batch_size=1.0,
                noise=ScriptedNoise(),
            )


def test_released_gradients_are_gone_with_zero_grad():
    """Held until the next release, they would be a second copy of the model at the peak of every step."""
    model, optimizer = private_model("plain", "flat")
    model(torch.randn(2, N).double()).mean().backward()
    optimizer.step()
    released = [weakref.ref(p.grad) for p in model.parameters()]
    assert all(this() is not None for this in released)
    optimizer.zero_grad()
    assert all(this() is None for this in released)


def test_an_optimizer_of_some_trained_layers_goes_on_after_zero_grad():
    """It clears what it holds. The released gradients of the other layers stay, and are no foreign ones."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    optimizer = PrivateOptimizer(
        torch.optim.SGD(model[1].parameters(), lr=0.1),
        ModelGradients(model),
        clipping=FlatClipping(1.0),
        noise_multiplier=1.0,
        expected_batch_size=EXPECTED,
        noise=SeededNoise(0, reproducibility_over_privacy=True),
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    mine = model[0].weight.grad
    optimizer.zero_grad()
    model[0].weight.grad = mine.clone()  # the control: a copy of a release is not the release
    model(torch.randn(4, 6)).square().mean().backward()
    with pytest.raises(RuntimeError, match="outside"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
def test_without_noise_the_divisor_is_applied_once_to_tensors_that_parameters_share():
    """Both biases of a recurrent layer have the same sum: divided in place, it would be divided twice."""
    model = nn.RNN(4, 3, batch_first=True).double()
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = PrivateOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        ModelGradients(model),
        clipping=FlatClipping(1e6),
        noise_multiplier=0.0,
        expected_batch_size=EXPECTED,
        noise=ScriptedNoise(),
    )
    x = torch.randn(4, 5, 4).double()
    optimizer.zero_grad()
    model(x)[0].square().sum().div(4).backward()
    optimizer.step()
    twin = nn.RNN(4, 3, batch_first=True).double()
    twin.load_state_dict(plain)
    twin(x)[0].square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad * EXPECTED, dict(twin.named_parameters())[name].grad, msg=name)
    assert model.bias_ih_l0.grad is not model.bias_hh_l0.grad


@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
class TestRecordsCountOnce:
    """One record must not reach a release twice, however a step is split or broken off."""

    def make(self, model, **options):
        return PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.0),
            ModelGradients(model),
            clipping=FlatClipping(1.0),
            noise_multiplier=0.0,
            expected_batch_size=1.0,
            noise=SeededNoise(0, reproducibility_over_privacy=True),
            loss_reduction="sum",
            **options,
        )

    def test_after_a_release_that_was_refused(self):
        """The sums of the refused step were added to those of the next one."""
        refusals = iter([RuntimeError("the disk is full")])

        def before_release(plan):
            if error := next(refusals, None):
                raise error

        model = nn.Linear(3, 1, bias=False)
        optimizer, record = self.make(model, before_release=before_release), torch.tensor([[8.0, 0.0, 0.0]])
        model(record).sum().backward()
        with pytest.raises(RuntimeError, match="disk is full"):
            optimizer.step()
        model(record).sum().backward()
        optimizer.step()
        assert torch.allclose(model.weight.grad, torch.tensor([[1.0, 0.0, 0.0]]), atol=1e-4)

    def test_with_a_rule_that_fills_the_same_memory_again(self):
        """The sum of the first physical batch was overwritten by that of the second, which then counted twice."""

        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(3))

            def forward(self, x):
                return x * self.weight

        class ScaleRule(GhostRule[Scale]):
            memory = torch.empty(3)

            def squared_norms(self, x, dA):
                return (x * dA).square().sum(1)

            def clipped_sum(self, x, dA, c):
                return {"weight": self.memory.copy_((c.to(x.dtype) @ (x * dA)).flatten())}

            def form(self, x, dA):
                return {"weight": x * dA}

        register_rule(Scale)(ScaleRule)
        try:
            model, pieces = Scale(), [PhysicalBatch(1, False, (0, 0), 0), PhysicalBatch(1, True, (0, 0), 1)]
            optimizer = self.make(model, current_batch=lambda: self.current)
            for self.current, record in zip(pieces, torch.eye(3)[:2, None], strict=True):
                model(8 * record).sum().backward()
                optimizer.step()
        finally:
            del _RULES[Scale]
        assert torch.allclose(model.weight.grad, torch.tensor([1.0, 1.0, 0.0]), atol=1e-4)
