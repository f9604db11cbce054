"""Parameters that a module holds itself, beside its layers: class tokens, layer scales, tables of positions, gates.

While the model runs, an entry for each sample stands in such a parameter's place (``recording/shared.py``), so what
comes back to it *is* the per-sample gradient, ``(B, ...)``. The layers of the module keep their own rules.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from spectral_dp.gradients.rules.rule import Rule

#: Containers that add nothing to their parameters' meaning, and hold none of their own unless a subclass does.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class HeldRule(Rule[nn.Module]):
    """Rule of a module's own parameters; coefficients have their shapes, unfiltered."""

    def form(self, x: Any, dA: Tensor) -> NoReturn:
        raise NotImplementedError("the gradients of parameters that a module holds itself come formed")


def can_be_held(module: nn.Module) -> bool:
    """Returns whether a module reads its parameters by name when it runs, beside layers that have rules of their own.

    Modules of torch are left out: some keep other references to their parameters (LSTM). So are those without layers,
    which are as quickly run again, and all parts of a model that is compiled, which reads its parameters when it is
    traced.
    """
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return True
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.")]
    is_of_torch = any(kind is not nn.Module and kind not in _CONTAINERS for kind in kinds)
    return bool(module._modules) and not is_of_torch


def is_compiled(model: nn.Module) -> bool:
    """Returns whether some part of a model is compiled."""
    return any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in model.modules())
