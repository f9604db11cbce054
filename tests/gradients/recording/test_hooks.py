"""Hooks of an object: gone with it, but not while torch goes through them."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_hook

from spectral_dp.gradients.recording import hooks
from spectral_dp.gradients.recording.hooks import Watch


class Noted(Watch):
    def __init__(self, *members):
        self.calls = []
        super().__init__(members)

    def _before(self, module, args):
        self.calls.append(("before", module))

    def _after(self, module, args, kwargs, output):
        self.calls.append(("after", module, output is None))


@pytest.fixture(autouse=True)
def _nothing_is_left_of_other_tests():
    gc.collect()
    Noted().remove()


def test_it_is_told_of_its_members_only():
    mine, other = nn.ReLU(), nn.ReLU()
    watch = Noted(mine)
    nn.Sequential(other, mine)(torch.ones(1))
    watch.remove()
    assert watch.calls == [("before", mine), ("after", mine, False)]


def test_it_is_told_of_a_pass_that_failed():
    layer = nn.Linear(2, 1)
    watch = Noted(layer)
    with pytest.raises(RuntimeError):
        layer(torch.ones(3))
    watch.remove()
    assert watch.calls == [("before", layer), ("after", layer, True)]


def test_it_is_told_of_nothing_while_it_is_paused():
    layer = nn.ReLU()
    watch = Noted(layer)
    with watch.paused():
        with watch.paused():
            layer(torch.ones(1))
        layer(torch.ones(1))
    assert watch.calls == []
    layer(torch.ones(1))
    watch.remove()
    assert len(watch.calls) == 2


def test_they_are_removed_when_asked():
    before = len(_global_forward_pre_hooks)
    watch = Noted()
    assert len(_global_forward_pre_hooks) == before + 1
    watch.remove()
    watch.remove()
    assert len(_global_forward_pre_hooks) == before


def test_the_others_stay_when_one_is_removed():
    layer = nn.ReLU()
    first, second = Noted(layer), Noted(layer)
    first.remove()
    layer(torch.ones(1))
    second.remove()
    assert (len(first.calls), len(second.calls)) == (0, 2)


def test_torch_calls_one_hook_however_many_there_are():
    """Catches hooks that pile up: each would be called for every module of every model in the process."""
    before = len(_global_forward_pre_hooks)
    watches = [Noted() for _ in range(5)]
    assert len(_global_forward_pre_hooks) == before + 1
    for watch in watches:
        watch.remove()
    assert len(_global_forward_pre_hooks) == before


def test_each_is_given_what_the_one_before_made_of_the_output():
    class Doubled(Noted):
        def _after(self, module, args, kwargs, output):
            self.calls.append(output)
            return 2 * output

    layer = nn.ReLU()
    watches = [Doubled(layer), Doubled(layer)]
    assert layer(torch.tensor(3.0)) == 12
    assert [watch.calls[-1] for watch in watches] == [3, 6]
    for watch in watches:
        watch.remove()


def test_it_is_given_the_output_before_other_process_wide_hooks_replace_it():
    """Else the gradient of what another hook returned would be taken for that of the layer's own output."""

    class Given(Noted):
        def _after(self, module, args, kwargs, output):
            self.calls = [output]

    layer = nn.ReLU()
    handle = register_module_forward_hook(lambda module, args, output: 3 * output)
    watch = Given(layer)
    try:
        assert layer(torch.tensor(2.0)) == 6
    finally:
        handle.remove()
        watch.remove()
    assert watch.calls == [2]


def test_an_error_of_one_does_not_keep_the_end_of_the_pass_from_the_others():
    class Refusing(Noted):
        def _after(self, module, args, kwargs, output):
            raise ValueError("refused")

    layer = nn.ReLU()
    watches = [Noted(layer), Refusing(layer), Refusing(layer), Noted(layer)]
    with pytest.raises(ValueError, match="refused"):
        layer(torch.ones(1))
    for watch in watches:
        watch.remove()
    assert watches[0].calls == watches[3].calls == [("before", layer), ("after", layer, False)]


def test_an_object_that_goes_changes_nothing_until_the_next_one_comes():
    """Catches a finalizer that removes hooks while a forward pass of another model goes through them."""
    before = len(_global_forward_pre_hooks)
    watch = Noted()
    for _ in _global_forward_pre_hooks.values():  # raises an error if the hooks change meanwhile
        watch = None
        gc.collect()
    assert watch is None
    Noted().remove()
    assert len(_global_forward_pre_hooks) == before


@pytest.mark.parametrize(
    "replace", [lambda layer, other: Noted(layer), lambda layer, other: other.remove()], ids=["makes", "removes"]
)
def test_one_that_another_thread_makes_while_they_are_replaced_is_not_lost(replace, monkeypatch):
    layer, made = nn.ReLU(), []
    other = Noted(layer)
    thread = threading.Thread(target=lambda: made.append(Noted(layer)))

    def meanwhile():
        if thread.ident is None:
            thread.start()
            thread.join(timeout=0.2)  # it waits until they are replaced

    monkeypatch.setattr(hooks, "_watches", (*hooks._watches, meanwhile))
    kept = replace(layer, other)
    thread.join()
    layer(torch.ones(1))
    other.remove()
    assert [len(watch.calls) for watch in (*made, kept) if watch] == [2] * (2 if kept else 1)


def test_one_that_a_finalizer_removes_while_another_comes_is_told_nothing_more(monkeypatch):
    """The garbage collector may run it at any moment, in the thread that replaces them."""
    layer = nn.ReLU()
    removed, made = Noted(layer), []
    garbage = [removed]

    def collected():
        if garbage:
            garbage.pop().remove()

    monkeypatch.setattr(hooks, "_watches", (*hooks._watches, collected))
    thread = threading.Thread(target=lambda: made.append(Noted(layer)), daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive(), "a thread waits for itself"
    layer(torch.ones(1))
    made[0].remove()
    assert (len(removed.calls), len(made[0].calls)) == (0, 2)
