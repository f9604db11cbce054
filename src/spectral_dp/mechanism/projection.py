"""The projection of Algorithm 1: the transform and the gains of one step as one linear map, and the map back.

    z  = a * (T g)        line 1, on the coordinates that are kept
    g~ = T^t (b * s)      lines 4 and 5, with zeros at the other coordinates

:func:`~spectral_dp.mechanism.perturbation.perturb` uses it for queries, and the rules of layers for gradients.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from spectral_dp.mechanism.gains import Gains
from spectral_dp.mechanism.transforms import Transform

_PIECE = 1 << 16  # kept coordinates that are transformed back at a time: few enough to stay in the cache


class Projection:
    """Turns signals into filtered coordinates, and coordinates back into signals.

    Coordinates that are *kept* are released. Coordinates that are *counted* are part of the norm that is clipped. Every
    kept coordinate is counted. In the paper's order (clip, then filter) some counted coordinates are not kept.

    Short signals are multiplied by a matrix of the needed basis vectors, which is made once for each dtype and device.
    Longer signals are transformed and then filtered.

    Attributes:
        transform: The transform of the last dimensions of a signal, of which there are as many as the gains have.
        gains: The gains of the coordinates.
    """

    def __init__(self, transform: Transform, gains: Gains) -> None:
        self.transform, self.gains = transform, gains
        self._dims = tuple(range(-gains.pre.ndim, 0))
        self._matrices: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def analyse(self, signal: Tensor, *, counted: bool = False) -> Tensor:
        """Returns the kept (or counted) coordinates ``(..., M)`` of a signal ``(..., *shape)``, times the pre-gains."""
        gains = self.gains
        if self._is_short(signal):
            return signal.flatten(self._dims[0]) @ self.matrix(signal, counted=counted).T
        z = self.transform.forward(signal, self._dims)
        if counted and gains.clips_dropped:
            return (z * gains.pre.to(z)).flatten(self._dims[0])[..., gains.counted.flatten().to(z.device)]
        z = gains.compress(z)
        return z if gains.kept_pre is None else z * gains.kept_pre.to(z)

    @cached_property
    def counted_size(self) -> int:
        """The number of counted coordinates."""
        return int(self.gains.counted.sum())

    def kept_of_counted(self, z: Tensor) -> Tensor:
        """Returns the kept coordinates among all counted ones."""
        if not self.gains.clips_dropped:
            return z
        return z[..., self.gains.kept.flatten()[self.gains.counted.flatten()].to(z.device)]

    def synthesise(self, kept: Tensor) -> Tensor:
        """Returns the signal ``(..., *shape)`` of kept coordinates ``(..., M)``, after the post-gains."""
        if self._is_short(kept):
            return (kept @ self._matrix("back", kept)).view(kept.shape[:-1] + self.gains.pre.shape)
        if kept.ndim == 1 or kept.numel() <= _PIECE:
            return self._transformed_back(kept)
        # Rows by rows: the spectrum with its zeros and what the transform makes on the way are as large as the signal.
        signal = kept.new_empty(kept.shape[:-1] + self.gains.pre.shape)
        rows = max(1, _PIECE * len(kept) // kept.numel())
        for some, out in zip(kept.split(rows), signal.split(rows), strict=True):
            out.copy_(self._transformed_back(some))
        return signal

    def _transformed_back(self, kept: Tensor) -> Tensor:
        gains = self.gains
        if gains.kept_post is not None:
            kept = kept * gains.kept_post.to(kept)
        return self.transform.inverse(gains.expand(kept), self._dims)

    def matrix(self, like: Tensor, *, counted: bool = False) -> Tensor:
        """Returns the kept (or counted) basis vectors times their pre-gains, ``(M, N)``, in the dtype of ``like``."""
        return self._matrix("counted" if counted else "kept", like)

    def _is_short(self, like: Tensor) -> bool:
        """Returns whether a matrix of basis vectors is faster. Half precision is excluded: the transform refuses it."""
        return self.gains.pre.numel() <= self.transform.matmul_limit and like.dtype in (torch.float32, torch.float64)

    def _matrix(self, which: Literal["kept", "counted", "back"], like: Tensor) -> Tensor:
        gains, key = self.gains, (which, like.dtype, like.device)
        if key not in self._matrices:
            basis = self.transform.basis(gains.pre.shape, dtype=like.dtype, device=like.device)
            rows = (gains.counted if which == "counted" else gains.kept).flatten().to(like.device)
            gain = (gains.post if which == "back" else gains.pre).flatten().to(like)
            self._matrices[key] = (gain[:, None] * basis)[rows]
        return self._matrices[key]
