"""Objects that watch the forward passes of a model. Torch is told of them once, however many there are.

Every private model has two such objects, and a process may hold many models, also some that the garbage collector has
not found yet. Hooks of each would be called for every module of all the others.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spectral_dp.gradients.recording.members import Members

#: All objects that watch, in the order in which they came. Replaced, never changed: a pass may be going through them.
_watches: tuple[weakref.ref[Watch], ...] = ()

#: Held while they are replaced: of two that threads make at once, one would be lost. A thread may need it twice, if the
#: garbage collector comes in between.
_REPLACING = threading.RLock()

#: Torch's handles of the two hooks that tell them.
_HANDLES: list[Any] = []


class Watch(ABC):
    """Is told before and after each forward pass of some modules, by process-wide hooks.

    The garbage collector may find the object gone at any moment, also while torch goes through its hooks for a forward
    pass of another model, and these must not change then. So they stay until another :class:`Watch` is made or removed.

    Args:
        members: The modules to watch.
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        self._members = Members(members)
        self._pauses = 0
        with _REPLACING:
            _keep((*_watches, weakref.ref(self)))  # which does not keep the object alive

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
        self._members = Members(())  # if the garbage collector calls this in the middle of _keep, that keeps it
        with _REPLACING:
            _keep(this for this in _watches if this() is not self)


def _keep(watches: Iterable[weakref.ref[Watch]]) -> None:
    """Tells these from now on, but for those that are gone. Where there are none, torch calls nothing."""
    global _watches
    _watches = tuple(this for this in watches if this() is not None)
    if _watches and not _HANDLES:
        # As they are: torch.compile would trace them with the module, and cannot.
        _HANDLES.append(register_module_forward_pre_hook(_disable_dynamo(_tell_before)))
        _HANDLES.append(register_module_forward_hook(_disable_dynamo(_tell_after), with_kwargs=True, always_call=True))
        # Before the hooks of others: what one of them returns in place of the output is not the layer's own.
        _HANDLES[-1].hooks_dict_ref().move_to_end(_HANDLES[-1].id, last=False)
    while _HANDLES and not _watches:
        _HANDLES.pop().remove()


def all_watches() -> Iterator[Watch]:
    """Yields all objects that watch now, in the order in which they came."""
    return (watch for this in _watches if (watch := this()) is not None)


def _watching(module: nn.Module) -> list[Watch]:
    return [watch for this in _watches if (watch := this()) is not None and watch._is_watching(module)]


def _tell_before(module: nn.Module, args: Any) -> None:
    for watch in _watching(module):
        watch._before(module, args)


def _tell_after(module: nn.Module, args: Any, *kwargs_and_output: Any) -> Any:
    # Torch leaves the keywords out when the forward pass failed.
    kwargs = kwargs_and_output[0] if len(kwargs_and_output) == 2 else {}
    output, watches = kwargs_and_output[-1], _watching(module)
    for place, watch in enumerate(watches, 1):
        try:
            replaced = watch._after(module, args, kwargs, output)
        except Exception:
            for other in watches[place:]:  # to them, too, the pass has ended
                with suppress(Exception):
                    other._after(module, args, {}, output)
            raise
        output = output if replaced is None else replaced
    return output
