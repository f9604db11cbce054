"""What all methods share: checkpoints that hold what a run needs, and defaults of those that take steps."""

import pytest
import torch
from torch import nn

from spectral_dp.experiments.method import Method
from spectral_dp.training.checkpoint import CheckpointError


class Stub(Method):
    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.loaded = None

    def batches(self):
        return iter(())

    def state(self):
        return {"own": 3}

    def load_state(self, state):
        self.loaded = state["own"]


def test_it_takes_steps_and_guarantees_nothing_unless_it_says_more():
    method = Stub()
    assert not method.release_at_once()
    assert method.learning_rate == 0.5
    assert (method.ledger, method.epsilon(), method.facts()) == (None, None, {})


def test_a_checkpoint_brings_back_model_state_and_epoch(tmp_path):
    method, other = Stub(), Stub()
    method.epoch = 4
    method.save(tmp_path / "checkpoint.pt", {"step": 7})
    assert other.load(tmp_path / "checkpoint.pt") == {"step": 7}
    assert torch.equal(other.model.weight, method.model.weight)
    assert (other.epoch, other.loaded) == (4, 3)


def test_a_checkpoint_of_another_run_is_named(tmp_path):
    method, other = Stub(), Stub()
    other.model = nn.Linear(3, 1)
    method.save(tmp_path / "checkpoint.pt", {})
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is not a checkpoint of this run"):
        other.load(tmp_path / "checkpoint.pt")
