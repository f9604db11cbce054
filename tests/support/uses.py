"""Norms and clipped sums of one layer as a step takes them: of what is kept of its use."""

from typing import NamedTuple

from torch import Tensor, nn

from spectral_dp.gradients.recording.call import Call
from spectral_dp.gradients.rules.rule import Rule
from spectral_dp.gradients.uses import condense


def squared_norms(rule: Rule, x: Tensor, dA: Tensor) -> Tensor:
    return condense(rule, x, dA).squared_norms()


def clipped_sums(rule: Rule, x: Tensor, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
    """By the names of the parameters."""
    sums = condense(rule, x, dA).clipped_sums(c)
    return {name: sums[parameter] for name, parameter in rule.trained().items()}


class Everything(NamedTuple):
    """All that there is to keep of a use."""

    x: Call
    dA: Tensor


def keep_all(module: nn.Module, call: Call, dA: Tensor) -> Everything:
    """What to tell a recorder that is looked at by itself."""
    return Everything(call, dA)
