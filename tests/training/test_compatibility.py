"""What cannot be made private is refused, each with its fix; what can be passes."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp.gradients import ModelGradients
from spectral_dp.mechanism.clipping import FlatClipping
from spectral_dp.mechanism.noise import SecureNoise
from spectral_dp.training.compatibility import check_criterion, require_compatible
from spectral_dp.training.optimizer import PrivateOptimizer


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def private_already(model):
    return PrivateOptimizer(
        sgd(model),
        ModelGradients(model),
        clipping=FlatClipping(1.0),
        noise_multiplier=1.0,
        expected_batch_size=1.0,
        noise=SecureNoise(),
    )


def test_what_is_compatible_passes():
    model = nn.Linear(3, 2)
    require_compatible(model)
    require_compatible(model, sgd(model), DataLoader(TensorDataset(torch.ones(4, 3))))


@pytest.mark.parametrize(
    ("model", "optimizer", "loader", "message"),
    [
        (nn.BatchNorm1d(3), None, None, "BatchNorm1d"),
        (nn.Linear(3, 2).requires_grad_(False), None, None, "no trainable parameter"),
        (nn.Linear(3, 2), lambda _: sgd(nn.Linear(3, 2)), None, "2 parameters that are not the model's"),
        (nn.Linear(3, 2), private_already, None, "private already"),
        (nn.Linear(3, 2), sgd, [1, 2, 3], "must be a torch DataLoader, got list"),
    ],
    ids=["mixes samples", "frozen", "of another model", "private", "no loader"],
)
def test_what_is_not_is_refused(model, optimizer, loader, message):
    with pytest.raises((ValueError, TypeError), match=message):
        require_compatible(model, optimizer and optimizer(model), loader)


@pytest.mark.parametrize(
    ("criterion", "reduction", "message"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), "mean", "give both the same"),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), "mean", "divides by the weights of the batch"),
    ],
)
def test_criteria_that_are_known_to_clip_at_the_wrong_scale(criterion, reduction, message):
    with pytest.raises(ValueError, match=message):
        check_criterion(criterion, reduction)


@pytest.mark.parametrize(
    ("criterion", "reduction"),
    [
        (None, "mean"),
        (nn.CrossEntropyLoss(), "mean"),
        (nn.CrossEntropyLoss(weight=torch.ones(3), reduction="sum"), "sum"),
        (nn.functional.cross_entropy, "mean"),
    ],
)
def test_other_criteria(criterion, reduction):
    check_criterion(criterion, reduction)


def test_a_model_in_data_parallel_is_refused_with_what_to_write_instead():
    for model in (nn.DataParallel(nn.Linear(2, 2)), nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))):
        with pytest.raises(ValueError, match=r"DataParallel, which averages gradients .*\(model.module\)"):
            require_compatible(model)
