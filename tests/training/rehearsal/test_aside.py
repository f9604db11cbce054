"""What happens aside leaves no trace."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, ReduceLROnPlateau

from spectral_dp.training.rehearsal.aside import generators_kept, schedulers_of, seed_everything, state_kept


def draws():
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002


def test_generators_are_put_back_also_after_an_error():
    seed_everything(1)
    expected = draws()
    seed_everything(1)

    def fail():
        with generators_kept():
            draws()
            seed_everything(7)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draws() == expected


def test_the_same_seed_gives_the_same_numbers():
    seed_everything(0)
    first = draws()
    seed_everything(0)
    assert draws() == first


def test_modes_learning_rates_and_schedules_are_put_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    schedulers = [CosineAnnealingLR(optimizer, 10), ReduceLROnPlateau(optimizer)]
    found = schedulers_of([optimizer])
    assert {id(s) for s in found} == {id(s) for s in schedulers}
    with state_kept(model, [optimizer], found):
        for _ in range(3):
            schedulers[0].step()  # warns where nothing was stepped, and warnings are errors
        optimizer.param_groups[0]["momentum"] = 0.1
        model.train()
        model[0].extra = torch.ones(3)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert schedulers[0].last_epoch == 0
    assert model.training
    assert not model[1].training
    assert not hasattr(model[0], "extra")


def test_schedulers_of_others_are_left_alone():
    mine, other = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0) for _ in range(2))
    kept = CosineAnnealingLR(other, 10)
    assert schedulers_of([mine]) == []
    assert schedulers_of([other]) == [kept]


class Gradual(LRScheduler):
    """Goes over to another scheduler after a while, which it holds; so does a package in wide use."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        return [rate * (self.last_epoch + 1) for rate in self.base_lrs]


def test_a_scheduler_within_a_scheduler_is_not_replaced_by_a_copy():
    """The copy would act on the copy of an optimizer; and a private optimizer cannot be copied."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    inner = CosineAnnealingLR(optimizer, 10)
    outer = Gradual(optimizer, inner)
    with state_kept(nn.Linear(1, 1), [optimizer], schedulers_of([optimizer])):
        inner.step()
        outer.step()
    assert outer.after is inner
    assert inner.optimizer is optimizer
    assert (inner.last_epoch, outer.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 0, 1.0)


def test_a_learning_rate_in_a_tensor_is_put_back():
    rate = torch.tensor(1.0)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=rate)
    scheduler = ExponentialLR(optimizer, gamma=0.5)
    with state_kept(nn.Linear(1, 1), [optimizer], [scheduler]):
        scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == 0.5
    assert float(optimizer.param_groups[0]["lr"]) == 1.0
