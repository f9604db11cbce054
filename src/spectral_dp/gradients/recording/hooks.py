"""Hooks that watch the forward passes of a model and go with their object, but never in the middle of a pass."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spectral_dp.gradients.recording.members import Members

#: Handles of objects that are gone. Their hooks do nothing any more, and are removed when the next object comes.
_LEFT: list[Any] = []


class Watch(ABC):
    """Is told before and after each forward pass of some modules, by process-wide hooks.

    The garbage collector may find the object gone at any moment, also while torch goes through its hooks for a forward
    pass of another model, and these must not change then. So the hooks of an object that is gone stay, and do nothing,
    until the next :class:`Watch` is made.

    Args:
        members: The modules to watch.
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        self._members = Members(members)
        self._pauses = 0
        this = weakref.ref(self)  # a hook must not keep its object alive

        def before(module: nn.Module, args: Any) -> None:
            watch = this()
            if watch is not None and watch._is_watching(module):
                watch._before(module, args)

        def after(module: nn.Module, args: Any, *kwargs_and_output: Any) -> Any:
            # Torch leaves the keywords out when the forward pass failed.
            kwargs = kwargs_and_output[0] if len(kwargs_and_output) == 2 else {}
            watch = this()
            if watch is None or not watch._is_watching(module):
                return None
            return watch._after(module, args, kwargs, kwargs_and_output[-1])

        self._handles = [
            # As they are: torch.compile would trace them with the module, and cannot.
            register_module_forward_pre_hook(_disable_dynamo(before)),
            register_module_forward_hook(_disable_dynamo(after), with_kwargs=True, always_call=True),
        ]
        self._finalizer = weakref.finalize(self, _LEFT.extend, self._handles)
        self._finalizer.atexit = False
        _remove_left()

    @abstractmethod
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Is called before the forward pass of a member."""

    @abstractmethod
    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Is called after it, with None for the output if it failed. What is returned, if anything, is the output."""

    def _is_watching(self, module: nn.Module) -> bool:
        return not self._pauses and module in self._members

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets modules be called without being watched."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def remove(self) -> None:
        """Stops watching, now."""
        self._finalizer.detach()
        for handle in self._handles:
            handle.remove()
        _remove_left()


def _remove_left() -> None:
    while _LEFT:
        _LEFT.pop().remove()
