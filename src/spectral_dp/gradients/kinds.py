"""Whether a layer computes what the rule of its kind was written for.

A rule knows the gradient of ``nn.Conv2d.forward``. A subclass, a patch or a property that changes anything which that
method uses has another gradient, and the rule would be silently wrong. So what a kind of layer does is written down
when its rule is registered: every method and property that ``forward`` reaches, by name. A layer in which one of these
names means something else is not of that kind any more.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from torch import nn

Behaviour = Mapping[str, Any]

#: What stands between the call of a layer and its ``forward``, and between a name and what it means.
_MACHINERY = ("__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward", "__getattr__", "__getattribute__")


def behaviour(kind: type[nn.Module]) -> Behaviour:
    """Returns all that ``forward`` reaches, by name: what the class defines there, or None (an attribute, a global)."""
    found: dict[str, Any] = {}
    pending = ["forward", *_MACHINERY]
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = _definition(kind, name)
            pending += _names_in(found[name])
    return found


def overrides(module: nn.Module, expected: Behaviour) -> list[str]:
    """Returns the names that mean something else in a layer, in its class or on the very instance."""
    kind, own, parameters = type(module), vars(module), module._parameters
    return [
        name
        for name, original in expected.items()
        if ((now := _definition(kind, name)) is not original and (_acts(now) or _acts(original)))
        or (name in own and (_acts(original) or name in parameters))
    ]


def _definition(kind: type, name: str) -> Any:
    """What a class defines under a name, itself or through its parents; None if only ``nn.Module`` does."""
    for parent in kind.__mro__:
        if parent is nn.Module:
            return None
        if name in vars(parent):
            return vars(parent)[name]
    return None


def _acts(value: Any) -> bool:
    """Whether an attribute of a class is code, rather than a value that a rule reads as ``forward`` does."""
    return callable(value) or hasattr(type(value), "__get__")


def _names_in(value: Any) -> Iterator[str]:
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    codes = [getattr(inspect.unwrap(function), "__code__", None)] if callable(function) else []
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            codes += code.co_consts  # functions inside the function
