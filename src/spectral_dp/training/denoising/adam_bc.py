"""Adam whose second moment is corrected for the known noise: DP-AdamBC (Tang, Shpilevskiy & Lécuyer 2024).

    m_t = β1 m_{t-1} + (1 - β1) g_t
    v_t = β2 v_{t-1} + (1 - β2) g_t²                                    φ_t likewise, of the variance of the noise
    x_t = x_{t-1} - lr * m̂_t / sqrt(max(v̂_t - φ̂_t, floor² φ̂_t))        hats: divided by 1 - β^t

Without the correction, the noise is nearly all of the second moment, and Adam is SGD with momentum. φ_t follows a noise
schedule as v_t does. What differs from the paper: the floor is a fraction of the noise rather than a number, so that it
means the same for every clipping bound and batch size; weight decay is decoupled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spectral_dp.training.wrapped_optimizer import loss_of

_LEAST = 1e-8  # smallest denominator where there is no noise, as in Adam


class AdamBC(Optimizer):
    """Adam with a second moment that is corrected for the noise. The formula is that of this module.

    Without a private optimizer around it, or without noise, it is Adam.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate.
        betas: The decays β1 and β2.
        floor: The smallest denominator, as a fraction of the standard deviation of the noise. The root of the second
            moment is known to about a fifth of it (β2 = 0.999).
        weight_decay: Decoupled weight decay.
    """

    noise_std: Mapping[Tensor, float]

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 0.2,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or floor <= 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                "AdamBC needs lr >= 0, betas in [0, 1), floor > 0 and weight_decay >= 0, got "
                f"{lr}, {betas}, {floor}, {weight_decay}"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "floor": floor, "weight_decay": weight_decay})
        self.noise_std = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes one step."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"], state["noise"] = 0, 0.0
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["noise"] = beta2 * state["noise"] + (1 - beta2) * self.noise_std.get(parameter, 0.0) ** 2
        mean_weight, square_weight = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        noise = state["noise"] / square_weight
        signal = (state["square"] / square_weight - noise).clamp_(min=group["floor"] ** 2 * noise)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["mean"], signal.sqrt_().add_(_LEAST), value=-group["lr"] / mean_weight)
