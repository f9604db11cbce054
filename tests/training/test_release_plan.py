"""The plan is what the step does: its sizes, its deviations and its noise multiplier are measured, with power."""

import dataclasses
import math

import pytest
import torch
from scipy import stats
from tests.support import small_targets as small
from tests.support.broken_steps import BrokenNoise, ForgetfulClipping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import BlockCirculantLinear, PrivacyEngine, audit
from spectral_dp.experiments.layer_facts import describe_layers
from spectral_dp.experiments.methods import EngineMethod
from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.mechanism.clipping import FlatClipping, PerLayerClipping
from spectral_dp.mechanism.filters import AnnealedFilter, LowPassFilter, PaperBandFilter
from spectral_dp.mechanism.noise import SeededNoise
from spectral_dp.relations import Relation
from spectral_dp.training.optimizer import PrivateOptimizer

ALPHA, STEPS, SIGMA, EXPECTED = 1e-5, 60, 1.3, 4.0
FILTERS = {"0": LayerConfig(LowPassFilter(0.5)), "2": LayerConfig(LowPassFilter(0.6))}
IN_A_BASIS = {**FILTERS, "3": LayerConfig(input_basis=small.public_basis(16, 5))}
CLIPPINGS = {
    "flat": FlatClipping(0.7),
    "per layer": PerLayerClipping((0.2, 0.9, 0.4)),
    "per layer, optimal": PerLayerClipping((0.2, 0.9, 0.4), "optimal"),
}


def network():
    """A convolution of 18 + 2 numbers, a block-circulant layer of 64, a dense one of 48 + 3."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Flatten(), BlockCirculantLinear(32, 16, 8, bias=False), nn.Linear(16, 3)
    ).double()


def private(kind=PrivateOptimizer, model=None, filters=FILTERS, **options):
    model = model or network()
    common = {"clipping": FlatClipping(0.7), "noise_multiplier": SIGMA, "expected_batch_size": EXPECTED}
    common["noise"] = SeededNoise(0, reproducibility_over_privacy=True)
    gradients = ModelGradients(model, filters)
    return model, kind(torch.optim.SGD(model.parameters(), lr=0.0), gradients, **common | options)


def energies(model, optimizer, plan):
    """The energy of the noise of so many steps without signal in each block, which is orthogonal to what was drawn."""
    total = [0.0] * len(plan.blocks)
    parameters = dict(model.named_parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        (0 * model(torch.ones(2, 1, 6, 6, dtype=torch.float64))).sum().backward()
        optimizer.step()
        for i, block in enumerate(plan.blocks):
            total[i] += sum(float(parameters[p.name].grad.square().sum()) for p in block.parameters) * EXPECTED**2
    return total


def p_values(total, plan, wrong=1.0):
    """Two-sided p-value of each block's energy, for noise of the plan's deviation on as many coordinates as it says."""
    found = []
    for energy, block in zip(total, plan.blocks, strict=True):
        below = stats.chi2.cdf(energy / (wrong * block.noise_std) ** 2, STEPS * block.coordinates)
        found.append(2 * min(below, 1 - below))
    return found


@pytest.mark.parametrize("filters", [FILTERS, IN_A_BASIS], ids=["filtered", "in a basis"])
@pytest.mark.parametrize("relation", list(Relation))
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_the_noise_of_a_step_is_that_of_the_plan(clipping, relation, filters):
    """Check C against the plan; with power against other deviations, and other numbers of coordinates."""
    model, optimizer = private(clipping=CLIPPINGS[clipping], relation=relation, filters=filters)
    plan = optimizer.release_plan()
    total = energies(model, optimizer, plan)
    assert min(p_values(total, plan)) > ALPHA
    for wrong in (2 / 3, 3 / 2):
        assert max(p_values(total, plan, wrong)) < ALPHA
    everything = [
        dataclasses.replace(p, coordinates=p.size) for block in plan.blocks[:2] for p in block.parameters
    ]  # as if nothing were filtered
    conv, circulant = everything[:-1], everything[-1:]
    blocks = [dataclasses.replace(b, parameters=tuple(e)) for b, e in zip(plan.blocks, (conv, circulant), strict=False)]
    assert max(p_values(total[:2], dataclasses.replace(plan, blocks=tuple(blocks)))) < ALPHA


def less_noise(draw):
    return 2 / 3 * draw()


class Departing(PrivateOptimizer):
    """Hands out one plan and carries out another, and has no check that its settings stay as they are."""

    def _check_unchanged(self):
        pass


class LowersItsMultiplier(Departing):
    def _release(self):
        self.noise_multiplier *= 2 / 3
        super()._release()
        self.noise_multiplier /= 2 / 3


class OtherBounds(Departing):
    """Clips by the plan, and noises each block by its own bound, without the shares of the others."""

    def _release(self):
        agreed, self.clipping = self.clipping, ForgetfulClipping(self.clipping.max_norms)
        super()._release()
        self.clipping = agreed


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (PrivateOptimizer, {"noise": BrokenNoise(less_noise, SeededNoise(0, reproducibility_over_privacy=True))}),
        (LowersItsMultiplier, {}),
        (OtherBounds, {}),
    ],
    ids=["weaker noise", "lower multiplier", "other bounds"],
)
def test_control_a_step_that_departs_from_its_plan_is_caught(kind, options):
    model, optimizer = private(kind, clipping=CLIPPINGS["per layer"], **options)
    plan = optimizer.release_plan()
    assert min(p_values(energies(model, optimizer, plan), plan)) < ALPHA


def test_the_plan_that_was_entered_in_the_ledger_is_carried_out():
    """Catches a step that reads its noise again after the ledger has been told."""
    entered = []

    def enter(plan):
        entered.append(plan)
        optimizer.noise_multiplier = SIGMA / 3

    model, optimizer = private(before_release=enter)
    plan = optimizer.release_plan()
    optimizer.zero_grad()
    (0 * model(torch.ones(2, 1, 6, 6, dtype=torch.float64))).sum().backward()
    optimizer.step()
    assert entered == [plan]
    energy = sum(float(p.grad.square().sum()) for p in model.parameters()) * EXPECTED**2
    coordinates = sum(block.coordinates for block in plan.blocks)
    assert stats.chi2.cdf(energy / plan.blocks[0].noise_std ** 2, coordinates) > ALPHA
    assert stats.chi2.cdf(energy / plan.blocks[0].noise_std ** 2 * 9, coordinates) > 1 - ALPHA
    assert optimizer.release_plan().noise_multiplier == SIGMA / 3, "of the next step"


def test_the_ledger_of_an_engine_lists_the_plan():
    model, data = nn.Linear(3, 2), TensorDataset(torch.randn(20, 3))
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.1,
        max_grad_norm=1.0,
        rehearsal=False,
    )
    planned = []
    for (x,) in loader:
        optimizer.noise_multiplier += 1.0
        planned.append(optimizer.release_plan())
        model(x).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [phase[:2] for phase in engine.accountant.ledger.phases] == [(p.noise_multiplier, 0.5) for p in planned]
    assert [p.expected_batch_size for p in planned] == [10, 10]


def test_names_sizes_and_bounds():
    model, optimizer = private(clipping=CLIPPINGS["per layer, optimal"])
    plan = optimizer.release_plan()
    assert [block.name for block in plan.blocks] == ["0", "2", "3"]
    listed = {p.name: (p.size, p.coordinates) for block in plan.blocks for p in block.parameters}
    assert listed.keys() == dict(model.named_parameters()).keys()
    assert listed["0.bias"] == (2, 2)
    assert listed["3.weight"] == (48, 48)
    assert listed["0.weight"][0] == 18
    assert listed["0.weight"][1] == 2 * 4  # of 9 coefficients of each kernel
    assert sum(clip**2 / b.max_norm**2 for clip, b in zip((0.2, 0.9, 0.4), plan.blocks, strict=True)) == pytest.approx(
        1
    )
    model[0].requires_grad_(False)
    optimizer.clipping = FlatClipping(0.7)
    assert [block.name for block in optimizer.release_plan().blocks] == ["2", "3"]


def test_a_layer_that_was_taken_out_of_the_model_is_released_as_noise_as_before():
    """It is still the optimizer's: what is planned for must not depend on where the model keeps it."""
    model, optimizer = private()
    plan, head = optimizer.release_plan(), model[3]
    model[3] = nn.Identity()
    assert optimizer.release_plan() == plan
    model(torch.ones(2, 1, 6, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert bool(head.weight.grad.any())


def test_a_plan_is_a_value():
    _, optimizer = private()
    plan = optimizer.release_plan()
    assert plan == optimizer.release_plan()
    assert len({plan, optimizer.release_plan()}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.noise_multiplier = 0.1


def test_layers_that_share_a_weight_are_one_block():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    (block,) = private(model=model, filters={})[1].release_plan().blocks
    assert [p.name for p in block.parameters] == ["0.weight", "1.bias"]
    assert block.coordinates == 20


def test_gains_that_change_from_step_to_step_change_the_plan():
    filters = {"2": LayerConfig(AnnealedFilter(start=0.8, end=0.0, steps=2))}
    model, optimizer = private(filters=filters)
    sizes = []
    for _ in range(3):
        sizes.append(optimizer.release_plan().blocks[1].coordinates)
        model(torch.ones(2, 1, 6, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] == 64


def test_without_noise_the_plan_says_so():
    _, optimizer = private(noise_multiplier=0.0, clipping=FlatClipping(math.inf))
    assert {block.noise_std for block in optimizer.release_plan().blocks} == {0.0}


def test_a_spectrum_of_unknown_size_has_no_plan_until_it_is_seen():
    filters = {"0": LayerConfig(PaperBandFilter(0.5), support="signal")}
    model, optimizer = private(filters=filters)
    with pytest.raises((RuntimeError, ValueError), match="input_layout"):
        optimizer.release_plan()
    model(torch.ones(2, 1, 6, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert optimizer.release_plan().blocks[0].coordinates > 2


def test_sums_of_another_size_than_planned_are_refused_before_the_ledger_is_told():
    entered = []
    model, optimizer = private(before_release=entered.append)
    rule, _ = optimizer.gradients.owner(model[3].weight)
    rule.clipped_sum = lambda *_: {"weight": torch.zeros(7), "bias": torch.zeros(3)}
    model(torch.ones(2, 1, 6, 6, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^7 coordinates of 3\.weight were summed, but 48 are to be"):
        optimizer.step()
    assert not entered


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_what_the_report_says_of_each_layer_is_the_plan(clipping):
    _, optimizer = private(clipping=CLIPPINGS[clipping], relation=Relation.REPLACE_ONE)
    planned = [(p, block) for block in optimizer.release_plan().blocks for p in block.parameters]
    method = object.__new__(EngineMethod)  # all that the description reads of a method
    method.optimizer = optimizer
    for fact, (parameter, block) in zip(describe_layers(method), planned, strict=True):
        assert (fact["name"], fact["parameters"], fact["released"]) == dataclasses.astuple(parameter)
        assert fact["noise_std"] == block.noise_std / EXPECTED
        assert fact["noise_std_per_parameter"] == pytest.approx(
            fact["noise_std"] * math.sqrt(parameter.coordinates / parameter.size)
        )


@pytest.mark.parametrize("relation", list(Relation))
def test_what_the_audit_claims_of_each_layer_is_the_plan(relation):
    """The auditor computes the deviation from the claim: both must come to the same."""
    claim = dataclasses.replace(small.CLAIM, relation=relation)
    target = small.target(claim, clipping="per_layer", noise_allocation="optimal")
    planned = [(p, block) for block in target._chosen.optimizer.release_plan().blocks for p in block.parameters]
    for output, (parameter, block) in zip(target.outputs, planned, strict=True):
        assert (output.name, output.size) == (parameter.name, parameter.size)
        assert output.noise_std == pytest.approx(block.noise_std, rel=1e-12)


def test_control_an_audit_does_not_take_a_sensitivity_on_trust(monkeypatch):
    """Replace-one noised as add-or-remove-one: plan and step agree, and both are wrong."""
    monkeypatch.setattr(
        "spectral_dp.mechanism.clipping.Clipped.sensitivity", lambda clipped, relation: clipped.max_norm
    )
    target = small.target(dataclasses.replace(small.CLAIM, relation=Relation.REPLACE_ONE))
    assert target.outputs[0].noise_std == pytest.approx(2 * target._chosen.optimizer.release_plan().blocks[0].noise_std)
    generator = torch.Generator().manual_seed(0)
    assert not audit.check_linear_map(target, audit.find_noise_map(target), target.blocks(2, generator), generator).ok
