"""What trials have shown is used for what has the same form, and for nothing else."""

import pytest
import torch
from tests.support.recorded_models import check, check_losses, run
from torch import nn

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.recording.knowledge import Fact, Knowledge
from spectral_dp.gradients.recording.trial import Origins, Trial, run_both


def learn(make, samples=3):
    """What two runs of ``make(samples at hand, seed)`` tell."""
    torch.manual_seed(0)
    x, knowledge, root = torch.randn(samples, 2, 4), Knowledge(), nn.Identity()
    layer = nn.Identity()

    def run(rows):
        trial = Trial(Origins(root))
        make(x[rows], lambda value, by=None: trial.seed("layer", trial.origins.of_call(layer), value, by))
        return trial

    run_both(run, samples, knowledge.learn)
    return knowledge


def relations(knowledge):
    """What was found of each layer."""
    return [next(iter(facts)).relation if facts else "unknown" for facts in knowledge.layers.values()]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (lambda x: torch.ones(3, 4), "shared"),
        (lambda x: x * 2, "rows"),
        (lambda x: x.flatten(0, 1), "rows"),
        (lambda x: x.transpose(0, 1).flatten(0, 1), "unknown"),
        (lambda x: x.sum(0), "unknown"),
    ],
)
def test_how_the_output_of_a_layer_belongs_to_the_samples(value, expected):
    assert relations(learn(lambda x, seed: seed(value(x)))) == [expected]


def test_samples_in_another_dimension_are_compared_where_they_are_said_to_be():
    time_first = learn(lambda x, seed: seed(x.transpose(0, 1)))
    told = learn(lambda x, seed: seed(x.transpose(0, 1), x))
    assert (relations(time_first), relations(told)) == (["unknown"], ["rows"])


def test_operations_on_what_is_shared_are_told_apart():
    def make(x, seed):
        table = seed(torch.ones(2, 4)) * 2
        return table + x

    (of_table,), (with_samples,) = learn(make).operations.values()
    assert (of_table.relation, with_samples.relation) == ("shared", "rows")
    assert with_samples.batched == (False, True)


def test_samples_that_meet_are_noticed():
    assert learn(lambda x, seed: seed(x) * 2).meets is None
    assert learn(lambda x, seed: seed(x - x.mean(0))).meets == "layer"


def test_a_fact_fits_what_has_the_same_form():
    rows, shared = Fact.of("rows", torch.ones(6, 4), 3), Fact.of("shared", torch.ones(6, 4), 3)
    assert (rows, shared) == (Fact("rows", 2, 2), Fact("shared", 0, 2))
    assert rows.fits(torch.ones(10, 4), 5)
    assert not rows.fits(torch.ones(5, 4), 5), "another number of rows of each sample"
    assert not rows.fits(torch.ones(10, 4, 1), 5)
    assert shared.fits(torch.ones(7, 4), 5)
    assert not shared.fits(torch.ones(7), 5)


def test_facts_that_contradict_each_other_tell_nothing():
    knowledge, other = Knowledge(), Knowledge()
    knowledge.layers[1], other.layers[1] = {Fact("shared", 0, 2)}, {Fact("rows", 2, 2)}
    assert knowledge.of_layer(1, torch.ones(6, 4), 3) == "shared"
    knowledge.update(other)
    assert knowledge.of_layer(1, torch.ones(6, 4), 3) == "unknown"
    assert knowledge.of_layer(1, torch.ones(5, 4), 3) == "shared", "no other fact fits"
    assert knowledge.of_layer(2, torch.ones(6, 4), 3) is None


class Parts(nn.Module):
    """The parts of the models below, and what is done with them."""

    def __init__(self, forward):
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)
        self.positions, self.run = nn.Embedding(8, 6), forward

    def forward(self, x):
        return self.run(self, x)


class WithGate(Parts):
    def __init__(self, forward):
        super().__init__(forward)
        self.gate = nn.Parameter(torch.randn(6))


def views_in_training(m, x):
    """Two views one behind the other, in training only: a trial sees one row of each sample."""
    n = len(x)
    x = torch.cat([x, x.cos()]) if m.training else x
    out = m.out(torch.tanh(m.layer(x.sin())))
    return out[:n] + out[n:] if m.training else out


def gated_views_in_training(m, x):
    n = len(x)
    x = torch.cat([x, x.cos()]) if m.training else x
    out = (x * m.gate) @ m.layer.weight.detach()
    return m.out(out[:n] + out[n:] if m.training else out)


def grid_in_training(m, x):
    """A layer that is given no samples in training: ten rows, which may be two of each of five samples."""
    if m.training:
        return m.out(x + m.layer(torch.linspace(0, 1, 60).double().view(10, 6))[: x.shape[1]])
    return m.out(m.layer(x.cos()))


def transposed(m, x):
    return m.out(torch.tanh(m.norm(m.layer(x).transpose(0, 1)))).transpose(0, 1)


def depends_on_the_number_of_samples(m, x):
    """The trial ends where its two runs part, so it does not meet the positions."""
    x = m.norm(x) if len(x) >= 3 else x
    return m.out(m.layer(x) + m.positions(torch.arange(x.shape[1])))


def needs_many_samples(m, x):
    assert len(x) > 3
    return m.out(m.layer(x) + m.positions(torch.arange(x.shape[1])))


@pytest.mark.parametrize("samples", [5, 10])
@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        (Parts, views_in_training),
        (WithGate, gated_views_in_training),
        (Parts, grid_in_training),
    ],
)
def test_what_training_does_otherwise_than_evaluation_is_refused(kind, forward, samples):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="evaluation mode"):
        run(kind(forward).double(), torch.randn(samples, 5, 6).double())


@pytest.mark.parametrize("forward", [transposed, depends_on_the_number_of_samples, needs_many_samples])
def test_as_many_positions_as_samples_are_not_taken_for_samples(forward):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="cannot be told apart"):
        run(Parts(forward).double(), torch.randn(5, 5, 6).double())


def test_as_many_channels_as_samples_are_told_from_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.LayerNorm(5)).double()
    check(model, torch.randn(5, 5, 6).double())


class Numbered(Parts):
    """What is done depends on how often it has been done; whole numbers may be counted."""

    def __init__(self):
        super().__init__(None)
        self.step = 0

    def forward(self, x):
        rows = x.flatten(0, 1) if self.step % 2 else x
        return self.out(torch.tanh(self.norm(rows.cos()) * 2)).view(len(x), -1)


def test_a_later_pass_that_folds_rows_is_tried_itself():
    torch.manual_seed(0)
    model, x = Numbered().double(), torch.randn(4, 5, 6).double()
    for parameter in (*model.layer.parameters(), *model.positions.parameters()):
        parameter.requires_grad_(False)
    gradients, norms = ModelGradients(model), []
    for model.step in (0, 1, 2, 3):
        model(x).sin().sum().backward()
        norms.append(gradients.take().squared_norms().sum(0))
    gradients.remove()
    for other in norms[1:]:
        torch.testing.assert_close(other, norms[0])


def test_a_first_batch_that_tells_nothing_does_not_stand_in_the_way():
    """All rows of zeros are alike, so whose they are cannot be told; later batches are tried again."""
    torch.manual_seed(0)
    model = Parts(lambda m, x: m.out(m.norm(m.layer(x).flatten(0, 1))).unflatten(0, x.shape[:2])).double()
    gradients = ModelGradients(model)
    with pytest.raises(RuntimeError, match="cannot be told apart"):
        model(torch.zeros(4, 5, 6).double())
    gradients.remove()
    check_losses(model, lambda m, x: m(x).sin().flatten(1).sum(1), torch.randn(4, 5, 6).double())
    gradients = ModelGradients(model)
    with pytest.raises(RuntimeError, match="cannot be told apart"):
        model(torch.zeros(4, 5, 6).double())
    model(torch.randn(4, 5, 6).double()).sum().backward()
    assert gradients.take().size == 4
    gradients.remove()


def attacked(m, x):
    """Computes a gradient by itself, which a run without gradients cannot."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(m.out(m.layer(x)).square().sum(), x)
    return m.out(m.layer((x + 0.1 * slope.sign()).detach()) + m.positions(torch.arange(x.shape[1])))


@pytest.mark.parametrize("samples", [4, 5])
def test_a_model_that_computes_gradients_by_itself(samples):
    torch.manual_seed(0)
    model = Parts(attacked).double()
    model.norm.requires_grad_(False)
    check_losses(model, lambda m, x: m(x).sin().flatten(1).sum(1), torch.randn(samples, 5, 6).double())


class Adapted(nn.Module):
    """A layer on windows folded into the batch, with an adapter that begins with zeros, as those of LoRA do."""

    def __init__(self, is_interleaved=False):
        super().__init__()
        self.dense, self.down, self.up = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(2, 6, bias=False)
        nn.init.zeros_(self.up.weight)
        self.out = nn.Linear(6, 2)
        self.is_interleaved = is_interleaved

    def forward(self, x):
        windows = (x.transpose(0, 1) if self.is_interleaved else x).flatten(0, 1)
        windows = self.dense(windows) + self.up(self.down(windows))
        if self.is_interleaved:
            windows = windows.unflatten(0, (x.shape[1], len(x))).transpose(0, 1).flatten(0, 1)
        return self.out(torch.tanh(windows).unflatten(0, (len(x), -1)).sum(1))


class TestZerosOnFoldedRows:
    def test_an_adapter_that_begins_with_zeros_is_exact(self):
        check_losses(Adapted().double(), lambda m, x: m(x).sin().sum(1), torch.randn(4, 3, 6, dtype=torch.float64))

    def test_frozen_but_for_the_adapter(self):
        model = Adapted().double()
        model.dense.requires_grad_(False)
        check_losses(model, lambda m, x: m(x).sin().sum(1), torch.randn(4, 3, 6, dtype=torch.float64))

    def test_interleaved_windows_are_refused_all_the_same(self):
        model = Adapted(is_interleaved=True).double()
        gradients = ModelGradients(model)
        with pytest.raises(RuntimeError, match="next to each other"):
            model(torch.randn(4, 3, 6, dtype=torch.float64)).sum().backward()
        gradients.remove()
