"""A basis of public vectors as a transform: its coordinates are ordered by eigenvalues in place of frequencies.

The basis ``U`` has orthonormal columns, the principal axes of what a layer is expected to see. The axis of the largest
eigenvalue takes the place of the lowest frequency. There may be fewer axes than numbers: what no axis reaches is
dropped, as a filter drops frequencies.

    z = U^t x           ``forward``
    x = U z             ``inverse``, exact on what the axes span
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from spectral_dp.mechanism.transforms import Transform, as_tuple, get_transform

_TOLERANCE = 1e-3  # for a basis that was computed in single precision
_PROBES = 8  # random vectors on which the basis is checked: the product with itself may be too large


class PublicBasis(Transform):
    """Orthonormal public vectors, for the inputs of dense layers: ``SpectralConfig(input_bases={"fc": basis})``.

    Formal guarantee. A basis never changes the privacy loss:

    - What is bounded: per-sample gradients are clipped *after* they are expressed in the basis, by the norm of the very
      coordinates that are summed. So one record moves the sum by at most the clipping bound, for any basis. That the
      basis is orthonormal matters for the accuracy only.
    - For which neighbours: the same as for the clipped sum, under either relation.
    - Under which assumption: the basis is public, so it is *not* computed from private records. It may come from
      generated images, from public data, or from weights that were released. Then nothing of it is released or charged.

    Args:
        vectors: The axes as columns, ``(n, k)``. They are copied as float32.
        eigenvalues: Their eigenvalues ``(k,)``: positive and in falling order.
        source: Where the basis comes from, for the privacy statement.

    Raises:
        ValueError: If shapes do not fit, or if vectors are not orthonormal.
    """

    name = "public_basis"
    matmul_limit = 0

    def __init__(self, vectors: Tensor, eigenvalues: Tensor, source: str = "generated images") -> None:
        if vectors.ndim != 2 or not 1 <= vectors.shape[1] <= vectors.shape[0]:
            raise ValueError(f"a basis is at most as many columns (n, k) as numbers, got {tuple(vectors.shape)}")
        if eigenvalues.shape != vectors.shape[1:]:
            raise ValueError(
                f"each of {vectors.shape[1]} axes needs an eigenvalue, got eigenvalues of shape "
                f"{tuple(eigenvalues.shape)}"
            )
        # Copies, because results that were computed from them are cached: nobody may change them afterwards.
        self._vectors = vectors.detach().to("cpu", torch.float32, copy=True).contiguous()
        self.eigenvalues = eigenvalues.detach().to("cpu", torch.float64, copy=True)
        self.source = source
        falls = bool((self.eigenvalues.diff() <= 0).all())
        if not bool(torch.isfinite(self.eigenvalues).all()) or not falls or not float(self.eigenvalues[-1]) > 0:
            raise ValueError("eigenvalues must be finite, positive and in falling order")
        self._check_orthonormal()
        self._copies: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @property
    def width(self) -> int:
        """The number ``n`` of entries of a vector."""
        return self._vectors.shape[0]

    @property
    def rank(self) -> int:
        """The number ``k`` of axes."""
        return self._vectors.shape[1]

    @cached_property
    def digest(self) -> str:
        """A checksum of axes and eigenvalues, by which two runs can be compared."""
        digest = hashlib.sha256(str(tuple(self._vectors.shape)).encode())
        for part in (self._vectors, self.eigenvalues):
            digest.update(part.numpy().data)
        return digest.hexdigest()

    @property
    def frequency_twin(self) -> Transform:
        """The axes are ordered as positions are, one for each frequency."""
        return get_transform("identity")

    def forward(self, x: Tensor, dims: int | Sequence[int] = -1) -> Tensor:
        """Returns the coordinates of ``x`` along one dimension: ``(..., n) -> (..., k)``."""
        return self._product(x, dims, self._like(x))

    def inverse(self, z: Tensor, dims: int | Sequence[int] = -1) -> Tensor:
        """Returns the vectors with these coordinates along one dimension: ``(..., k) -> (..., n)``."""
        return self._product(z, dims, self._like(z).T)

    def _matrix(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._vectors.T.to(device, dtype)  # the axes as rows, (k, n)

    def frequencies(self, shape: int | Sequence[int]) -> Tensor:
        """Returns the rank of every axis by its eigenvalue, ``(k, 1)``: 0 for the largest."""
        self.check_shape(as_tuple(shape))
        return torch.arange(self.rank)[:, None]

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raises ``ValueError`` unless this is the shape ``(k,)`` of the coordinates."""
        if tuple(shape) != (self.rank,):
            raise ValueError(f"this basis has {self.rank} coordinates, and not {tuple(shape)}")

    def _product(self, x: Tensor, dims: int | Sequence[int], matrix: Tensor) -> Tensor:
        axes = as_tuple(dims)
        if len(axes) != 1 or x.shape[axes[0]] != len(matrix):
            raise ValueError(
                f"expected {len(matrix)} numbers along one dimension, got shape {tuple(x.shape)} and dims {axes}"
            )
        return (x.movedim(axes[0], -1) @ matrix).movedim(-1, axes[0])

    def _like(self, x: Tensor) -> Tensor:
        key = x.dtype, x.device
        if key not in self._copies:
            if x.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"transforms take float32 or float64, got {x.dtype}: convert with x.float() first")
            with torch.inference_mode(False):  # it is kept, and training cannot use inference tensors
                self._copies[key] = self._vectors.to(x.device, x.dtype)
        return self._copies[key]

    def _check_orthonormal(self) -> None:
        generator = torch.Generator().manual_seed(0)
        probes = torch.randn(self.rank, _PROBES, generator=generator)
        back = self._vectors.T @ (self._vectors @ probes)
        error = (back - probes).norm(dim=0) / probes.norm(dim=0)
        if not float(error.max()) <= _TOLERANCE:  # also refuses NaN
            raise ValueError(
                f"the vectors are not orthonormal (they miss by {float(error.max()):.2g}): give eigenvectors, or "
                "orthonormal columns of torch.linalg.qr"
            )

    def _fast(self, x: Tensor, ndim: int) -> Tensor:
        return self.forward(x)

    def _fast_inverse(self, z: Tensor, ndim: int) -> Tensor:
        return self.inverse(z)

    def __deepcopy__(self, memo: dict[int, Any]) -> PublicBasis:
        return self  # it never changes, and it is large

    def __repr__(self) -> str:
        return (
            f"PublicBasis({self.rank} axes of {self.width} numbers, from {self.source}, sha256 {self.digest[:16]}: "
            "public, so nothing of it is released or charged)"
        )
