"""Saves and restores what a rehearsal changes: random generators, schedulers, what they set, the model's state."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from spectral_dp.gradients.recording.state import Keepsake, copied

_SCHEDULED = ("noise_multiplier", "clipping")  # what schedulers set on a private optimizer


@contextmanager
def state_kept(model: nn.Module, optimizers: Sequence[Optimizer], schedulers: Sequence[Any]) -> Iterator[None]:
    """Restores the state of model, optimizers and schedulers after one iteration of a user's loop.

    The parameters of the model are not copied: no optimizer steps within, and a forward pass that writes to them is an
    error.

    Args:
        model: The model.
        optimizers: The private optimizer and the one that it wraps.
        schedulers: All schedulers that act on these optimizers.
    """
    keepsake = Keepsake(model)
    settings = [
        (group, {k: copied(v) for k, v in group.items() if k != "params"})
        for o in optimizers
        for group in o.param_groups
    ]
    scheduled = [(o, {k: v for k, v in vars(o).items() if k in _SCHEDULED}) for o in optimizers]
    # Other objects that a scheduler holds, such as another scheduler or a model, are not replaced by copies.
    schedules = [(s, copied({k: v for k, v in vars(s).items() if k != "optimizer"})) for s in schedulers]
    for optimizer in optimizers:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler warns that nothing was stepped
    try:
        with generators_kept():
            yield
    finally:
        keepsake.restore()
        for scheduler, state in schedules:
            vars(scheduler).update(state)
        for optimizer, values in scheduled:
            vars(optimizer).update(values)
        for group, values in settings:
            for name, value in values.items():
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    group[name].copy_(value)  # a learning rate that is a tensor and changes in place
                else:
                    group[name] = value


@contextmanager
def in_evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keeps modules in evaluation mode, also in a loop that calls ``model.train()`` at every step.

    It does not restore their modes; :func:`state_kept` does.
    """

    def switch(module: nn.Module, _: Any) -> None:
        module.training = False

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_pre_hook(switch))
            module.training = False
        yield


def is_dropout(module: nn.Module) -> bool:
    """Returns whether a module, by its class or its name, only draws random numbers in training mode (dropout)."""
    return isinstance(module, nn.modules.dropout._DropoutNd | nn.RReLU) or "drop" in type(module).__name__.lower()


def seed_everything(seed: int) -> None:
    """Seeds all global random generators."""
    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)  # faster: sets no seed for devices that are not there
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the user's loop may draw from it


def generator_states() -> int:
    """Returns a hash of the states of the global generators. Equal states have equal hashes."""
    _, keys, *rest = np.random.get_state()  # noqa: NPY002
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return hash((*(bytes(s.numpy()) for s in states), random.getstate(), np.asarray(keys).tobytes(), *rest))


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restores the states of the global generators afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def schedulers_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Returns all schedulers that act on these optimizers, since a loop may step one at every batch.

    Optimizers do not know their schedulers, so all objects of the process are searched. Schedulers of the noise and of
    the clipping are recognised by the method that returns the next value, as in Opacus.
    """
    objects = gc.get_objects()
    # A process has a hundred times more objects than classes, so each class is looked at once.
    kinds = {kind for kind in set(map(type, objects)) if _is_scheduler(kind)}
    found = [o for o in objects if type(o) in kinds] if kinds else []
    return [s for s in found if any(getattr(s, "optimizer", None) is optimizer for optimizer in optimizers)]


def _is_scheduler(kind: type) -> bool:
    if issubclass(kind, LRScheduler):
        return True
    return any("get_noise_multiplier" in vars(k) or "get_max_grad_norm" in vars(k) for k in kind.__mro__)
