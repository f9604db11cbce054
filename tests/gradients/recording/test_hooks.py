"""Hooks of an object: gone with it, but not while torch goes through them."""

import gc

import pytest
from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_pre_hook

from spectral_dp.gradients.recording.hooks import Hooks


class Owner:
    def __init__(self):
        self.handles = [register_module_forward_pre_hook(lambda module, args: None)]
        self.hooks = Hooks(self, self.handles)


@pytest.fixture(autouse=True)
def _nothing_is_left_of_other_tests():
    gc.collect()
    Owner().hooks.remove()


def test_they_are_removed_when_asked():
    before = len(_global_forward_pre_hooks)
    owner = Owner()
    assert len(_global_forward_pre_hooks) == before + 1
    owner.hooks.remove()
    owner.hooks.remove()
    assert len(_global_forward_pre_hooks) == before


def test_an_object_that_goes_changes_nothing_until_the_next_one_comes():
    """Catches a finalizer that removes hooks while a forward pass of another model goes through them."""
    before = len(_global_forward_pre_hooks)
    owner = Owner()
    for _ in _global_forward_pre_hooks.values():  # raises an error if the hooks change meanwhile
        owner = None
        gc.collect()
    assert owner is None
    Owner().hooks.remove()
    assert len(_global_forward_pre_hooks) == before
