"""Records make the gradients they promise, through each library's own step; functions are checked for the protocol."""

import dataclasses

import pytest
import torch
from tests.support import small_targets as small
from torch import nn
from torch.utils.data import TensorDataset

from spectral_dp import BlockCirculantLinear, SpectralConfig, audit
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.gradients import LayerConfig
from spectral_dp.mechanism.filters import PaperBandFilter
from spectral_dp.training.sampling import PoissonLoader

FAR = dataclasses.replace(small.CLAIM, max_grad_norm=1e6)  # nothing is clipped


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x))).mean(1)


MODELS = {
    "small": (small.model, torch.zeros(small.SHAPE)),
    "strided": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2), torch.zeros(4, 9, 8)),
    "reflected": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), torch.zeros(1, 6, 6)),
    "one dimension": (lambda: nn.Conv1d(2, 3, 5, padding=2), torch.zeros(2, 12)),
    "tokens": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), BlockCirculantLinear(4, 6, 3)), torch.zeros(3, 5)),
    "cut blocks": (lambda: nn.Sequential(nn.Flatten(), BlockCirculantLinear(10, 7, 4)), torch.zeros(1, 2, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_record_makes_the_gradient_it_promises(name):
    """The gradient at its support is the signal, and nothing else moves but a bias, by one."""
    make, example = MODELS[name]
    target = audit.SpectralTarget(make(), FAR, example=example, seed=0)
    generator = torch.Generator().manual_seed(0)
    for block in target.blocks(3, generator):
        direction = torch.randn(len(block.labels), generator=generator)
        released = target.release([block.record(direction, 100.0)], Script())
        signal = 100 * (direction / direction.norm()).double() @ block.basis
        at = released[block.support][: len(signal)]
        if block.name != "bias":
            torch.testing.assert_close(at, signal, rtol=1e-4, atol=1e-3)
        assert released.norm() == pytest.approx(100, rel=1e-3)


def test_layers_without_a_recipe_get_records_all_the_same():
    target = audit.SpectralTarget(Tokens(), small.CLAIM, example=torch.tensor([1, 2, 5]), seed=0)
    generator = torch.Generator().manual_seed(0)
    assert {b.layer for b in target.blocks(2, generator)} == {"embedding", "norm", "head"}
    noise = audit.find_noise_map(target)
    assert audit.check_linear_map(target, noise, target.blocks(2, generator), generator).ok
    assert all(v.ok for v in audit.check_neighbours(target, generator))


def test_filtered_dense_layers_are_looked_at_in_their_spectrum():
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    spectral = SpectralConfig(linear_ratio=0.5, input_layouts={"1": (2, 4, 4)})
    target = audit.SpectralTarget(model, small.CLAIM, input_shape=(2, 4, 4), spectral=spectral, seed=0)
    generator = torch.Generator().manual_seed(0)
    block = target.blocks(2, generator)[0]
    maps = audit.find_block_map(target, audit.find_noise_map(target), block)
    kept = (maps.A.norm(dim=0) > 0.5).sum()
    assert 1 < kept <= 8
    torch.testing.assert_close(maps.A.norm(dim=0) > 1e-3, maps.A.norm(dim=0) > 0.99)


def test_physical_splits_change_nothing():
    generator = torch.Generator().manual_seed(0)
    releases = []
    for size in (64, 3):
        target = small.target(max_physical_batch_size=size)
        whole = target.ordinary(7, torch.Generator().manual_seed(1))
        single = [b.record(torch.ones(len(b.labels)), 10.0) for b in target.blocks(2, generator.manual_seed(0))]
        releases.append(torch.stack([target.release(records, Script()) for records in (whole, single)]))
    torch.testing.assert_close(*releases, rtol=1e-4, atol=1e-5)


def test_an_audit_leaves_the_model_as_it_was():
    model = small.model()
    before = [p.detach().clone() for p in model.parameters()]
    target = audit.SpectralTarget(model, small.CLAIM, input_shape=small.SHAPE)
    target.release(target.ordinary(3, torch.Generator()))
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_chosen_batches_are_those_of_the_audited_loader_only():
    """Catches coins that are replaced for the whole process: a loader that is read meanwhile tosses its own."""
    target, other = small.target(), iter(PoissonLoader(TensorDataset(torch.arange(400)), batch_size=200))
    backward, seen = target._backward, []

    def and_read_another(modules, rows):
        seen.append((len(rows), len(next(other)[0])))
        backward(modules, rows)

    target._backward = and_read_another
    target.release(target.ordinary(3, torch.Generator()))
    ((chosen, of_other),) = seen
    assert chosen == 3
    assert of_other > 100


def test_own_noise_is_fresh_and_a_seed_repeats_it():
    secure = small.target(seed=None)
    assert not torch.equal(secure.release([]), secure.release([]))
    assert torch.equal(small.target(seed=3).release([]), small.target(seed=3).release([]))


def test_runs_have_the_claimed_rate_and_noise_of_their_own():
    target = small.target()
    record = target.blocks(2, torch.Generator())[0].record(torch.ones(9), 1e4)
    first, second = (target.run([record] * 50, 12) for _ in range(2))
    assert first.sample_rate == pytest.approx(0.1)
    first, second = (torch.stack(list(run.releases)) for run in (first, second))
    assert first.shape == (12, target.size)
    assert not torch.equal(first, second)
    quiet = torch.stack(list(target.run([target.null()] * 50, 12, noise_off=True).releases))
    assert float(quiet.abs().max()) == 0


def test_a_run_with_signal_support_may_begin_with_an_empty_batch():
    """Catches a spectrum whose size is learnt from the first sample."""
    layers = {"0": LayerConfig(PaperBandFilter(0.5), support="signal")}
    for spectral in (SpectralConfig.paper(), SpectralConfig(layers=layers)):
        target = small.target(spectral=spectral)
        assert len(list(target.run([target.null()] * 20, 2).releases)) == 2


def test_example_or_shape():
    with pytest.raises(ValueError, match="either input_shape or example"):
        audit.SpectralTarget(small.model(), small.CLAIM)


class TestOpacus:
    @pytest.fixture
    def target(self):
        pytest.importorskip("opacus", reason="the control, from the 'baseline' extra")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))
        return audit.OpacusTarget(model, small.CLAIM, input_shape=small.SHAPE)

    def test_the_control_passes_every_audit(self, target):
        effort = audit.Effort(
            2, canary_blocks=6, per_block=4, scores=1000, run_scores=100, steps=10, noise_steps=10, calls=40
        )
        report = audit.run_audit(target, effort=effort, confidence=0.999, seed=0)
        assert report.ok, report.violations
        (not_made,) = (v for v in report.verdicts if v.ok is None)
        assert not_made.audit == "neighbours, not finite"

    def test_its_releases_are_those_of_our_step(self, target):
        """The same records through both libraries, noise off."""
        ours = audit.SpectralTarget(target._template, small.CLAIM, input_shape=small.SHAPE)
        records = ours.ordinary(70, torch.Generator().manual_seed(0))  # more than one physical batch
        torch.testing.assert_close(
            ours.release(records, Script()), target.release(records, Script()), rtol=1e-3, atol=1e-4
        )

    def test_other_relations_are_refused(self):
        pytest.importorskip("opacus")
        claim = dataclasses.replace(small.CLAIM, relation="replace_one")
        with pytest.raises(ValueError, match="add_or_remove_one"):
            audit.OpacusTarget(nn.Linear(3, 2), claim, input_shape=(3,))


class TestFunctions:
    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (lambda g: g, r"shape \(4,\), got \(2, 4\)"),
            (lambda g: g.sum(0).tolist(), "must return a torch.Tensor, got list"),
            (lambda g: g.sum(0).long(), "floating-point numbers, got torch.int64"),
            (lambda g: g.sum(0) + missing, "failed on 2 gradients of length 4: NameError"),  # noqa: F821
        ],
    )
    def test_the_protocol_is_checked(self, function, message):
        target = audit.FunctionTarget(function, audit.Claim(1.0), dimension=4)
        with pytest.raises((TypeError, ValueError), match=message):
            target.release([target.null()] * 2)

    def test_means_are_turned_into_sums(self):
        claim = audit.Claim(1.0, expected_batch_size=5)
        for returns, divisor in (("mean", 5), ("sum", 1)):
            target = audit.FunctionTarget(lambda g, d=divisor: g.sum(0) / d, claim, dimension=2, returns=returns)
            assert target.release([torch.ones(2), torch.ones(2)]).tolist() == pytest.approx([2, 2])

    def test_noise_out_of_reach_is_noticed(self):
        import numpy as np

        source = np.random.default_rng(0)

        def release(gradients):
            total = torch.nn.functional.normalize(gradients.nan_to_num(0), dim=1).sum(0)
            return total + torch.from_numpy(source.normal(size=8)).float()

        target = audit.FunctionTarget(release, audit.Claim(1.0, sample_rate=0.2, steps=5), dimension=8, returns="sum")
        assert not target.controls_noise
        effort = audit.Effort(
            2, canary_blocks=2, per_block=8, scores=400, run_scores=50, steps=5, noise_steps=20, calls=40
        )
        report = audit.run_audit(target, effort=effort, confidence=0.999, seed=0)
        assert report.ok, report.violations
        left_out = {v.audit for v in report.verdicts if v.ok is None}
        assert left_out == {"linear map", "neighbours", "batch size", "neighbours, over a run", "sampling"}

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("nothing", "FILE.py:callable"),
            ("absent.py:release", "there is no file absent.py"),
            ("{}:other", "AttributeError"),
            ("{}:number", "is a int, not a function"),
        ],
    )
    def test_loading(self, path, message, tmp_path):
        file = tmp_path / "mine.py"
        file.write_text("number = 1\ndef release(g):\n    return g.sum(0)\n")
        assert audit.load_function(f"{file}:release")(torch.ones(2, 3)).tolist() == [2, 2, 2]
        with pytest.raises(ValueError, match=message):
            audit.load_function(path.format(file))
