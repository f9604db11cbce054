"""The types of settings: a value from a file or a flag must have the type of its setting, or is refused."""

from __future__ import annotations

import math
import types
import typing
from typing import Any, Literal

from spectral_dp.errors import SpectralDPError
from spectral_dp.relations import Relation


class SettingsError(SpectralDPError, ValueError):
    """Settings that cannot be run, with what to change."""


def kind_of(hint: Any) -> Any:
    """Returns the type of a setting without the None of an optional one."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return next(member for member in members if member is not type(None))


def checked_setting(name: str, hint: Any, value: Any) -> Any:
    """Returns the value in the type of its setting, or says what that is."""
    kind = kind_of(hint)
    if value is None and kind is not hint:
        return None
    if kind is Relation or typing.get_origin(kind) is Literal:
        listed = tuple(Relation) if kind is Relation else typing.get_args(kind)
        if value not in listed:
            raise SettingsError(f"{name} must be one of {', '.join(listed)}, got {value!r}")
        return Relation(value) if kind is Relation else value
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and type(value) is float and not math.isfinite(value):
        raise SettingsError(f"{name} must be finite, got {value}")
    if typing.get_origin(kind) is dict:
        _, element = typing.get_args(kind)
        numbers = element is float
        if isinstance(value, dict) and all(
            type(v) in ((int, float) if numbers else (bool, int, float, str)) for v in value.values()
        ):
            return {str(k): float(v) if numbers else v for k, v in value.items()}
        what = "layer names to numbers" if numbers else "names to numbers, texts, true or false"
        raise SettingsError(f"{name} must map {what}, got {value!r}")
    if typing.get_origin(kind) is list:
        (element,) = typing.get_args(kind)
        accepted, what = ((int, float), "numbers") if element is float else ((str,), "layer names")
        if isinstance(value, list) and all(type(v) in accepted for v in value):
            return [element(v) for v in value]
        raise SettingsError(f"{name} must be a list of {what}, got {value!r}")
    if type(value) is not kind:
        raise SettingsError(f"{name} must be of type {kind.__name__}, got {value!r}")
    return value
