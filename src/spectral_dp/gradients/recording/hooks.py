"""Hooks that belong to an object and go when it goes, but never in the middle of somebody's forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

#: Handles of objects that are gone. Their hooks do nothing any more, and are removed when the next object comes.
_LEFT: list[Any] = []


class Hooks:
    """Process-wide hooks of an object.

    The garbage collector may find the object gone at any moment, also while torch goes through its hooks for a forward
    pass of another model, and these must not change then. So the hooks of an object that is gone stay until the next
    :class:`Hooks` are made; they must do nothing without their object.

    Args:
        owner: The object that the hooks belong to.
        handles: What registering the hooks returned.
    """

    def __init__(self, owner: object, handles: Sequence[Any]) -> None:
        self._handles = handles
        self._finalizer = weakref.finalize(owner, _LEFT.extend, handles)
        self._finalizer.atexit = False
        _remove_left()

    def remove(self) -> None:
        """Removes the hooks now."""
        self._finalizer.detach()
        for handle in self._handles:
            handle.remove()
        _remove_left()


def _remove_left() -> None:
    while _LEFT:
        _LEFT.pop().remove()
