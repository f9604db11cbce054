"""Our own step as a target: what is audited is what trains, and nothing else is touched."""

import pytest
import torch
from tests.support import small_targets as small
from torch.utils.data import TensorDataset

from spectral_dp import SpectralConfig, audit
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.gradients import LayerConfig
from spectral_dp.mechanism.filters import PaperBandFilter
from spectral_dp.training.sampling import PoissonLoader


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
