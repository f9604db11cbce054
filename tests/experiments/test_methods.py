"""The methods behind one interface: batches, what they say of themselves, and checkpoints of their own."""

import sys

import pytest
import torch
from torch.nn import functional as F

from spectral_dp.experiments import methods
from spectral_dp.experiments.diagnostics import Watched
from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.settings import SettingsError
from spectral_dp.experiments.trainer import load_data
from spectral_dp.training.checkpoint import CheckpointError
from spectral_dp.training.engine import PrivacyEngine


def start(settings):
    data = load_data(settings)
    return methods.start(settings, build_network(settings, tuple(data.train_images.shape[1:]), 10), data)


def train_an_epoch(method):
    """Returns the batches that were no rehearsals."""
    seen = []
    for batch in method.batches():
        method.optimizer.zero_grad()
        F.cross_entropy(method.model(batch.images.float() / 255), batch.labels.long()).backward()
        method.optimizer.step()
        if not batch.is_rehearsal:
            seen.append(batch)
    return seen


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("spectral", methods.EngineMethod),
        ("dpsgd", methods.EngineMethod),
        ("opacus", methods.OpacusMethod),
        ("nonprivate", methods.NonPrivateMethod),
    ],
)
def test_an_epoch_of_every_method(tiny, name, kind):
    method = start(tiny(method=name))
    assert type(method) is kind
    assert method.steps_per_epoch == 4
    batches = train_an_epoch(method)
    assert method.epoch == 1
    assert sum(batch.is_last for batch in batches) == 4
    if name == "nonprivate":
        assert (method.epsilon(), method.ledger, method.facts()) == (None, None, {})
        assert torch.cat([batch.labels for batch in batches]).sort()[0].equal(method._labels.sort()[0])
        return
    facts = method.facts()
    assert (facts["steps"], facts["sample_rate"], facts["expected_batch_size"]) == (4, 0.25, 50)
    assert method.ledger.phases[-1][:2] == (1.0, 0.25)
    assert 0 < method.epsilon() < 20
    assert facts["noise_source"] == "seeded, reproducible"


def test_an_epsilon_is_turned_into_noise_that_spends_no_more(tiny):
    method = start(tiny(method="dpsgd", epsilon=3.0, epochs=1))
    train_an_epoch(method)
    assert 2.5 < method.epsilon() <= 3.0


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)])
def test_optimizers_have_the_options_of_the_settings(tiny, name, kind):
    settings = tiny(optimizer=name, learning_rate=0.25, weight_decay=0.125, momentum=0.5 if name == "sgd" else 0.0)
    optimizer = methods.make_optimizer(settings, torch.nn.Linear(2, 2))
    assert type(optimizer) is kind
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.25, 0.125)
    assert group.get("momentum", 0.5) == 0.5


@pytest.mark.parametrize("name", ["spectral", "opacus", "nonprivate"])
def test_a_checkpoint_restores_weights_epoch_and_ledger(tiny, tmp_path, monkeypatch, name):
    monkeypatch.setattr("spectral_dp.training.run._LEDGERS", [])
    first, second = start(tiny(method=name)), start(tiny(method=name))
    train_an_epoch(first)
    first.save(tmp_path / "checkpoint.pt", {"note": 3})
    assert second.load(tmp_path / "checkpoint.pt") == {"note": 3}
    assert second.epoch == 1
    assert second.epsilon() == first.epsilon()
    for ours, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_checkpoint_of_another_method_is_refused(tiny, tmp_path):
    plain, opacus = start(tiny(method="nonprivate")), start(tiny(method="opacus"))
    plain.save(tmp_path / "checkpoint.pt", {})
    with pytest.raises(CheckpointError, match="is not a checkpoint of this run"):
        opacus.load(tmp_path / "checkpoint.pt")


def test_epochs_of_plain_training_are_shuffled_by_seed_and_epoch(tiny):
    def order(seed, epochs):
        method = start(tiny(method="nonprivate", seed=seed))
        return [torch.cat([batch.images.flatten(1).sum(1) for batch in method.batches()]) for _ in range(epochs)]

    first, second = order(1, 2)
    assert not torch.equal(first, second)
    assert torch.equal(order(1, 1)[0], first)
    assert not torch.equal(order(2, 1)[0], first)


def test_diagnostics_are_watched_only_when_asked_for(tiny):
    assert start(tiny()).diagnostics is None
    method = start(tiny(unsafe_diagnostics=True))
    assert isinstance(method.diagnostics, Watched)
    assert method.optimizer.clipping is method.diagnostics
    assert repr(method.diagnostics.policy) == repr(start(tiny()).optimizer.clipping)


def test_only_seeded_runs_are_seeded(tiny, monkeypatch):
    """Catches noise from the seed of the initialisation in a run that is called private."""
    seeds = []
    make = PrivacyEngine.__init__
    monkeypatch.setattr(PrivacyEngine, "__init__", lambda self, **k: (seeds.append(k["seed"]), make(self, **k))[1])
    for reproducible in (True, False):
        start(tiny(reproducible=reproducible, seed=5))
    assert seeds == [5, None]


def test_without_opacus_the_extra_is_named(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(SettingsError, match=r"spectral-dp\[baseline\]"):
        start(tiny(method="opacus"))
