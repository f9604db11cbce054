"""A network and settings small enough that a whole training run takes a moment."""

import pytest
from torch import nn

from spectral_dp import models
from spectral_dp.experiments import trainer
from spectral_dp.experiments.settings import Settings


class Tiny(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.input_layouts = {"fc1": input_shape}
        self.fc1 = nn.Linear(input_shape[0] * input_shape[1] * input_shape[2], 16)
        self.fc2 = nn.Linear(16, classes)

    def forward(self, x):
        return self.fc2(self.fc1(x.flatten(1)).tanh())


@pytest.fixture(autouse=True)
def _nothing_is_drawn(monkeypatch):
    """Leaves out the figures of runs and what they write for TensorBoard: both take longer than the training."""
    monkeypatch.setattr(trainer, "_tensorboard", lambda directory: None)
    monkeypatch.setattr(trainer, "draw_run", lambda directory: None)


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch):
    monkeypatch.setattr("spectral_dp.models.registry._REGISTRY", {**models.registry._REGISTRY})
    models.register_model("tiny", Tiny, spectral={"linear_ratio": 0.5})


@pytest.fixture
def tiny():
    """Makes resolved settings of a run of a second; reproducible, so that runs can be compared."""

    def make(**others):
        common = {
            "model": "tiny",
            "train_size": 200,
            "test_size": 100,
            "batch_size": 50,
            "epochs": 2,
            "reproducible": True,
            "accountant": "rdp",  # quicker than the tighter one
        }
        return Settings(**(common | ({} if "epsilon" in others else {"noise_multiplier": 1.0}) | others)).resolved()

    return make
