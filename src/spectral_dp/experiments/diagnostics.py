"""Figures of the raw private data, for debugging only.

Formal guarantee: none. Gradient norms, the fraction clipped and the training loss are computed from the records without
noise. They are recorded only when a run is told to (``unsafe_diagnostics``), and are not to be published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectral_dp.mechanism.clipping import Clipping


@dataclass(eq=False)
class Watched(Clipping):
    """Clips as another policy does, and remembers the norms it saw and how many were cut."""

    policy: Clipping
    norms: list[Tensor] = field(default_factory=list, repr=False)
    clipped: list[Tensor] = field(default_factory=list, repr=False)

    def factors(self, squared_norms: Tensor) -> Tensor:
        """Returns the factors of the policy, and remembers the norms."""
        factors = self.policy.factors(squared_norms)
        self.norms.append(squared_norms.sum(0).sqrt().cpu())
        self.clipped.append((factors < 1).reshape(-1, squared_norms.shape[-1]).any(0).cpu())
        return factors

    def noise_bounds(self, sizes: Sequence[int]) -> list[float]:
        """Returns the bounds of the policy."""
        return self.policy.noise_bounds(sizes)

    def __repr__(self) -> str:
        return repr(self.policy)  # what is released is the same

    def take(self) -> dict[str, float]:
        """Returns the figures since the last call."""
        norms, clipped = (torch.cat(parts) if parts else torch.zeros(0) for parts in (self.norms, self.clipped))
        self.norms, self.clipped = [], []
        finite = norms[norms.isfinite()]
        if not len(finite):
            return {}
        return {
            "gradient_norm_median": finite.median().item(),
            "gradient_norm_90_percent": finite.double().quantile(0.9).item(),
            "clipped_fraction": clipped.double().mean().item(),
        }
