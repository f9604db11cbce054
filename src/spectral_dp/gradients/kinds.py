"""Checks that a layer computes what the rule of its kind was written for.

For example, a rule knows the gradient of ``nn.Conv2d.forward``. If a subclass, a patch or a property changes anything
that this method uses, the gradient is another one and the rule would be silently wrong. So when a rule is registered,
all methods and properties that ``forward`` reaches are recorded by name. A layer in which one of these names means
something else does not use the rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from torch import nn

Behaviour = Mapping[str, Any]

#: The methods that run between the call of a layer and its ``forward``, or that look up a name.
_MACHINERY = ("__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward", "__getattr__", "__getattribute__")


def behaviour(kind: type[nn.Module]) -> Behaviour:
    """Returns what the class defines under each name that ``forward`` reaches; None for attributes and globals."""
    found: dict[str, Any] = {}
    pending = ["forward", *_MACHINERY]
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = _definition(kind, name)
            pending += _names_in(found[name])
    return found


def overrides(module: nn.Module, expected: Behaviour) -> list[str]:
    """Returns the names that mean something else in this layer, through its class or on the instance itself."""
    kind, own, parameters = type(module), vars(module), module._parameters
    return [
        name
        for name, original in expected.items()
        if ((now := _definition(kind, name)) is not original and (_acts(now) or _acts(original)))
        or (name in own and (_acts(original) or name in parameters))
    ]


def _definition(kind: type, name: str) -> Any:
    """Returns what a class or its parents define under a name; None if only ``nn.Module`` does."""
    for parent in kind.__mro__:
        if parent is nn.Module:
            return None
        if name in vars(parent):
            return vars(parent)[name]
    return None


def _acts(value: Any) -> bool:
    """Returns whether an attribute of a class is code, and not a value that a rule reads as ``forward`` does."""
    return callable(value) or hasattr(type(value), "__get__")


def _names_in(value: Any) -> Iterator[str]:
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    codes = [getattr(inspect.unwrap(function), "__code__", None)] if callable(function) else []
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            codes += code.co_consts  # functions inside the function
