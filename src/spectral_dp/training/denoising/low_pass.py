"""A low-pass filter over time: DOPPLER (Zhang, Bu, Hong & Razaviyayn 2024), with a filter of first order.

    m_t = (1 - κ) m_{t-1} + κ/2 (g_t + g_{t-1}),   c_t the same for inputs 1,   m_t / c_t to the optimizer

Gradients change slowly from step to step, and the noise is independent at every step, so the slow part has the better
ratio of signal to noise. κ in (0, 1] is the gain; the smaller it is, the more is filtered, and the later a change of
the gradient is seen. The tap at t - 1 removes the fastest frequency altogether. With κ = 1 two gradients are averaged.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from spectral_dp.training.denoising.noise_aware import GradientFilter


class LowPassGradients(GradientFilter):
    """Gives the wrapped optimizer gradients that are filtered over time. The formula is that of this module.

    Args:
        optimizer: The optimizer to wrap.
        gain: κ, in (0, 1].
    """

    def __init__(self, optimizer: Optimizer, gain: float = 0.1) -> None:
        super().__init__(optimizer)
        if not 0 < gain <= 1:
            raise ValueError(f"the gain of a low-pass filter must be in (0, 1], got {gain}")
        self.gain = gain

    def _filtered(self, gradient: Tensor, noise_std: float, memory: dict[str, Any]) -> tuple[Tensor, float]:
        kept, tap = 1 - self.gain, self.gain / 2
        now, before = noise_std**2, memory.get("last_variance", 0.0)
        slow = gradient * tap
        if memory:
            slow += kept * memory["slow"] + tap * memory["last"]
        weight = kept * memory.get("weight", 0.0) + tap * (2 if memory else 1)
        # Independent noise of each step; that of the last one is in m_{t-1} and in the tap, with the same sign.
        variance = kept**2 * memory.get("variance", 0.0) + tap**2 * (now + before) + 2 * kept * tap**2 * before
        memory |= {"slow": slow, "last": gradient.clone(), "weight": weight}
        memory |= {"variance": variance, "last_variance": now}
        return slow / weight, math.sqrt(variance) / weight
