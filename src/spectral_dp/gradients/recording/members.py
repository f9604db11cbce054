"""The modules of a model, told apart by what they are and not by what they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn


class Members:
    """A set of modules that does not keep them alive.

    A ``WeakSet`` would not do: the hash of a metric of torchmetrics changes with what it has counted, so a module that
    was a member when it was called would be none when it returns.

    Args:
        modules: The members.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = {id(module): weakref.ref(module) for module in modules}

    def __contains__(self, module: nn.Module) -> bool:
        found = self._modules.get(id(module))
        return found is not None and found() is module
