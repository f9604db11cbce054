"""A Kalman filter of the gradient: DiSK (Zhang, Bu, Hong, Balle & Razaviyayn 2024), with one release for each step.

The gradient is a state that drifts (variance Q a step) and is observed with the noise of the release (variance R_t):

    K_t = (P_{t-1} + Q) / (P_{t-1} + Q + R_t)                    gain
    e_t = e_{t-1} + K_t (g_t - e_{t-1})                          estimate, to the optimizer
    P_t = (1 - K_t) (P_{t-1} + Q)

``gain`` κ is what K_t tends to as long as the noise stays that of the first step, which sets Q = κ² R_1 / (1 - κ). If a
scheduler changes the noise, the gain follows. The first gradient is taken as it is (K_1 = 1).

The paper also predicts how the gradient changes along the step, from gradients at two points. With γ = (1 - κ) / κ
these come together in *one* gradient, which is taken ahead of the weights:

    g_t is released at  y_t = x_t + γ_t (x_t - x_{t-1}),   γ_t = (1 - K_t) / K_t

This is the version here, because it is one release for each step, which the ledger lists. What differs from the paper:
γ is not free, and the gain begins at 1 and follows the noise. Between steps the model holds y_t; ``settled`` puts x_t
in its place for evaluating and saving.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from spectral_dp.training.denoising.noise_aware import GradientFilter


class KalmanGradients(GradientFilter):
    """Gives the wrapped optimizer Kalman estimates of the gradient. The formulas are those of this module.

    Args:
        optimizer: The optimizer to wrap.
        gain: κ, in (0, 1). With 1/2, gradients are taken one step ahead; less looks further ahead.
    """

    def __init__(self, optimizer: Optimizer, gain: float = 0.5) -> None:
        super().__init__(optimizer)
        if not 0 < gain < 1:
            raise ValueError(f"the gain of a Kalman filter must be in (0, 1), got {gain}")
        self.gain = gain

    def _filtered(self, gradient: Tensor, noise_std: float, memory: dict[str, Any]) -> tuple[Tensor, float]:
        observed = noise_std**2
        if "estimate" not in memory:
            drift = self.gain**2 * observed / (1 - self.gain)
            memory |= {"estimate": gradient.clone(), "uncertainty": observed, "drift": drift, "variance": observed}
        else:
            predicted = memory["uncertainty"] + memory["drift"]
            gain = _gain(predicted, observed)
            memory["estimate"] = torch.lerp(memory["estimate"], gradient, gain)
            memory["uncertainty"] = (1 - gain) * predicted
            memory["variance"] = (1 - gain) ** 2 * memory["variance"] + gain**2 * observed
        next_gain = _gain(memory["uncertainty"] + memory["drift"], observed)
        memory["ahead"] = (1 - next_gain) / next_gain
        return memory["estimate"].clone(), math.sqrt(memory["variance"])

    def _step_filtered(self, parameters: list[Tensor]) -> None:
        before = {}
        for parameter in parameters:
            if "weights" in self._memory[parameter]:
                parameter.copy_(self._memory[parameter]["weights"])
            before[parameter] = parameter.clone()
        self.original_optimizer.step()
        for parameter in parameters:
            memory = self._memory[parameter]
            memory["weights"] = parameter.clone()
            parameter.add_(parameter - before[parameter], alpha=memory["ahead"])

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Puts the weights x_t in the place of those ahead for a while, for evaluating and saving."""
        held = {parameter: memory["weights"] for parameter, memory in self._memory.items() if "weights" in memory}
        ahead = {parameter: parameter.detach().clone() for parameter in held}
        with torch.no_grad():
            for parameter, weights in held.items():
                parameter.copy_(weights)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, weights in ahead.items():
                    parameter.copy_(weights)


def _gain(predicted: float, observed: float) -> float:
    return predicted / (predicted + observed) if observed else 1.0
