"""The registry of rules: which rule belongs to which kind of layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from spectral_dp.gradients.kinds import Behaviour, behaviour, overrides
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.rule import Rule

_RULES: dict[type[nn.Module], Callable[[Any, LayerConfig], Rule[Any]]] = {}
_KINDS: dict[type[nn.Module], tuple[Behaviour, frozenset[str] | None]] = {}
_NAMED: list[tuple[re.Pattern[str], Callable[[Any, LayerConfig], Rule[Any]], tuple[str, ...]]] = []
RuleType = TypeVar("RuleType", bound=Callable[[Any, LayerConfig], Rule[Any]])


def register_rule(
    *module_types: type[nn.Module], parameters: Iterable[str] | None = None
) -> Callable[[RuleType], RuleType]:
    """Returns a decorator that registers a rule, or a function that returns one, for these kinds of layer.

    A later registration for the same kind replaces an earlier one. A subclass of a registered layer uses its rule too,
    unless it overrides something that ``forward`` uses.

    Args:
        module_types: The classes of the layers.
        parameters: The names of all parameters that the rule gives gradients of. A layer with other parameters, such
            as those from which its weight is computed (weight_norm, spectral_norm, prune), does not use the rule. None
            means that the rule covers all parameters that a layer has.
    """
    names = None if parameters is None else frozenset(parameters)

    def decorate(rule: RuleType) -> RuleType:
        for module_type in module_types:
            _RULES[module_type] = rule
            _KINDS[module_type] = behaviour(module_type), names
        return rule

    return decorate


def register_rule_by_name(pattern: str, *, parameters: Iterable[str]) -> Callable[[RuleType], RuleType]:
    """Registers a rule for kinds of layer of packages that are not imported, by where their classes stand.

    Args:
        pattern: Regular expression for all of ``module.Class``.
        parameters: As of :func:`register_rule`.
    """

    def decorate(rule: RuleType) -> RuleType:
        _NAMED.append((re.compile(pattern), rule, tuple(parameters)))
        return rule

    return decorate


def find_rule(module: nn.Module) -> Callable[[Any, LayerConfig], Rule[Any]] | None:
    """Returns the rule of a layer, or None if there is none or the layer differs from what the rule is for."""
    kind = _kind_of(module)
    return None if kind is None or differences(module) else _RULES[kind]


def differences(module: nn.Module) -> list[str]:
    """Returns how a layer differs from the kind that has a rule: names that it overrides, parameters that it adds."""
    kind = _kind_of(module)
    if kind is None:
        return []
    expected, names = _KINDS[kind]
    own = (name for name, parameter in module._parameters.items() if parameter is not None)
    return overrides(module, expected) + [name for name in own if names is not None and name not in names]


def _kind_of(module: nn.Module) -> type[nn.Module] | None:
    """The first class of a layer that has a rule; one that is known by its name is registered when it is first met."""
    for kind in type(module).__mro__:
        if kind not in _RULES and issubclass(kind, nn.Module):
            name = f"{kind.__module__}.{kind.__qualname__}"
            for pattern, rule, parameters in _NAMED:
                if pattern.fullmatch(name):
                    register_rule(kind, parameters=parameters)(rule)
        if kind in _RULES:
            return kind
    return None
