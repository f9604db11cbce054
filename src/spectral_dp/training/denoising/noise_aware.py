"""How an optimizer learns of the noise on the gradients that it gets, and wrappers that change these gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from spectral_dp.training.wrapped_optimizer import WrappedOptimizer, loss_of


@runtime_checkable
class NoiseAware(Protocol):
    """An optimizer that wants to know the noise. The private optimizer sets ``noise_std`` before every step.

    Attributes:
        noise_std: For each parameter, the standard deviation of the noise on an entry of its gradient (the root mean
            square over its entries, where a filter leaves more noise on some than on others). It is public.
    """

    noise_std: Mapping[Tensor, float]


class GradientFilter(WrappedOptimizer):
    """Wraps an optimizer so that it gets filtered gradients. A subclass says how by :meth:`_filtered`.

    Parameter groups and state are those of the wrapped optimizer. The state of the filter is beside it in
    :meth:`state_dict`. Gradients are as they were when the step is over.

    Args:
        optimizer: The optimizer to wrap. If it is noise-aware, it is told the noise that is left.
    """

    noise_std: Mapping[Tensor, float]

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.noise_std = {}
        self._memory: dict[Tensor, dict[str, Any]] = {}

    def _filtered(self, gradient: Tensor, noise_std: float, memory: dict[str, Any]) -> tuple[Tensor, float]:
        """Returns what the wrapped optimizer gets in place of a gradient, and the noise that is left on it.

        Args:
            gradient: The released gradient of a parameter. It must not be changed.
            noise_std: The standard deviation of its noise.
            memory: What the filter remembers of this parameter: tensors and numbers, empty at first.
        """
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Filters the gradients and makes a step of the wrapped optimizer."""
        loss = loss_of(closure)
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        released = [p.grad for p in parameters]
        left = {}
        for parameter in parameters:
            assert parameter.grad is not None
            memory = self._memory.setdefault(parameter, {})
            noise = self.noise_std.get(parameter, 0.0)
            parameter.grad, left[parameter] = self._filtered(parameter.grad, noise, memory)
        if isinstance(self.original_optimizer, NoiseAware):
            self.original_optimizer.noise_std = left
        self._step_filtered(parameters)
        for parameter, gradient in zip(parameters, released, strict=True):
            parameter.grad = gradient
        return loss

    def _step_filtered(self, parameters: list[Tensor]) -> None:
        self.original_optimizer.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters to the wrapped optimizer."""
        self.original_optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients."""
        self.original_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimizer, and that of the filter under ``filter``."""
        order = [p for group in self.param_groups for p in group["params"]]
        memory = {i: dict(self._memory[p]) for i, p in enumerate(order) if p in self._memory}
        return {**self.original_optimizer.state_dict(), "filter": memory}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`.

        Raises:
            ValueError: If the state is that of an optimizer without this filter.
        """
        state = dict(state_dict)
        if "filter" not in state:
            raise ValueError(f"this state has no part of {type(self).__name__}: it was saved without a gradient filter")
        memory = state.pop("filter")
        self.original_optimizer.load_state_dict(state)
        order = [p for group in self.param_groups for p in group["params"]]
        self._memory = {
            order[i]: {
                name: value.to(order[i].device, copy=True) if isinstance(value, Tensor) else value
                for name, value in kept.items()
            }
            for i, kept in memory.items()
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.original_optimizer!r})"
