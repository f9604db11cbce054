"""Finds the layers of a model and their rules, and groups layers that share parameters into blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.gradients.rules.held import HeldRule, can_be_held, is_compiled
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.gradients.rules.rule import Rule


class Layer(NamedTuple):
    """A layer of a model: its name and its rule."""

    name: str
    rule: Rule[Any]


def layers_of(model: nn.Module, configs: dict[str, LayerConfig]) -> list[Layer]:
    """Returns every module that has parameters of its own, with its rule.

    Modules inside one that is handled by the fallback are not listed, because the fallback covers them.

    Args:
        model: The model.
        configs: What is released of layers, by name. Entries that are used are removed.

    Raises:
        ValueError: If a configuration does not fit its layer, or names a layer that is not listed.
    """
    layers: list[Layer] = []
    covered: set[nn.Module] = set()
    may_hold = not is_compiled(model)
    for name, module in model.named_modules():
        is_parametrized = nn.utils.parametrize.is_parametrized(module)
        has_own = any(True for _ in module.parameters(recurse=False)) or is_parametrized
        if module in covered or not has_own:
            continue
        is_held = may_hold and can_be_held(module) and not is_parametrized
        make: Callable[[Any, LayerConfig], Rule[Any]] = find_rule(module) or (HeldRule if is_held else FallbackRule)
        try:
            rule = make(module, configs.pop(name, LayerConfig()))
        except ValueError as error:
            raise ValueError(f"layer {name!r}: {error}") from error
        if rule.covers_parts:
            covered.update(module.modules())
        layers.append(Layer(name, rule))
    if swallowed := [name for name in configs if dict(model.named_modules()).get(name) in covered]:
        fallbacks = ", ".join(repr(layer.name) for layer in layers if layer.rule.covers_parts)
        raise ValueError(
            f"layers {swallowed} cannot be filtered: they lie inside {fallbacks}, which has parameters of its own and "
            "no rule, so it is handled as a whole. Move those parameters into layers of their own"
        )
    if configs:
        known = ", ".join(repr(layer.name) for layer in layers)
        raise ValueError(f"no trained layer named {', '.join(map(repr, configs))}: the model has {known}")
    return layers


def by_shared_parameters(layers: list[Layer]) -> list[list[Layer]]:
    """Returns the blocks, which are clipped as one: single layers, and groups of layers that share parameters."""
    blocks: list[tuple[set[nn.Parameter], list[Layer]]] = []
    for layer in layers:
        parameters, members = set(layer.rule.parameters().values()), [layer]
        for block in [b for b in blocks if b[0] & parameters]:
            blocks.remove(block)
            parameters |= block[0]
            members = block[1] + members
        blocks.append((parameters, members))
    for _, members in blocks:
        _check_same_release(members)
    return [members for _, members in blocks]


def _check_same_release(members: list[Layer]) -> None:
    """Raises ``ValueError`` if layers that share a parameter would release it in different coordinates."""
    seen: dict[nn.Parameter, Layer] = {}
    for layer in members:
        for name, parameter in layer.rule.parameters().items():
            other = seen.setdefault(parameter, layer)
            if other.rule.config != layer.rule.config:
                raise ValueError(
                    f"layers {other.name!r} and {layer.name!r} share {name!r} but release it differently: give both "
                    f"the same setting (they have {other.rule.config} and {layer.rule.config})"
                )
