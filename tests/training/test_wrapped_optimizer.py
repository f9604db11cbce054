"""What is done to the one is done to the other."""

import torch
from torch import nn

from spectral_dp.training.wrapped_optimizer import WrappedOptimizer


def both():
    inner = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9)
    return inner, WrappedOptimizer(inner)


def test_schedulers_of_the_one_act_on_the_other():
    inner, outer = both()
    torch.optim.lr_scheduler.ExponentialLR(outer, gamma=0.5)
    outer.param_groups[0]["lr"] = 3.0
    assert inner.param_groups[0]["lr"] == 3.0
    assert outer.defaults["momentum"] == inner.defaults["momentum"] == 0.9


def test_groups_and_state_that_are_replaced_are_replaced_in_both():
    inner, outer = both()
    outer.param_groups = outer.param_groups[:0]
    assert inner.param_groups == []
    outer.state = state = type(inner.state)(dict)
    assert inner.state is state


def test_a_checkpoint_of_the_one_fits_the_other():
    inner, outer = both()
    inner.param_groups[0]["params"][0].grad = torch.ones(1, 2)
    inner.step()
    other_inner, other = both()
    other.load_state_dict(outer.state_dict())
    assert torch.equal(other_inner.state_dict()["state"][0]["momentum_buffer"], torch.ones(1, 2))


def test_hooks_are_called_by_the_step_of_the_wrapped_one():
    inner, outer = both()
    called = []
    outer.register_step_post_hook(lambda *_: called.append(1))
    inner.step()
    assert called == [1]
