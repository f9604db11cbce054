"""Modules are told apart by what they are."""

import gc

import pytest
import torch
from torch import nn

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.recording.members import Members


class Metric(nn.Module):
    """Has another hash whenever it has counted something, and compares by making another one, as in torchmetrics."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __hash__(self):
        return hash(self.count)

    def __eq__(self, other):
        return Metric()

    def forward(self, x):
        self.count += len(x)
        return torch.tensor(float(self.count))


def test_a_member_stays_one_whatever_it_counts():
    metric, other = Metric(), Metric()
    members = Members([metric])
    metric.count = 7
    assert metric in members
    assert other not in members


def test_members_are_not_kept_alive():
    layer = nn.Linear(2, 2)
    members = Members([layer])
    place = id(layer)
    del layer
    gc.collect()
    assert members._modules[place]() is None


@pytest.mark.parametrize("metrics", [1, 2])
def test_a_metric_beside_the_network_does_not_hide_the_end_of_a_pass(metrics):
    """Else what is called afterwards would be taken to belong to it, with other samples."""
    model = nn.ModuleDict({"net": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))})
    model["metrics"] = nn.Sequential(*[Metric() for _ in range(metrics)])
    gradients = ModelGradients(model)
    for metric in model["metrics"]:
        with gradients.state.paused():  # what it counts is not for this test
            metric(torch.randn(5, 3))
    model["net"](torch.randn(4, 6)).sum().backward()
    assert gradients.take().size == 4
    gradients.remove()
