"""A filter with gains by eigenvalue: what a public prior expects to be small is enlarged before the clip.

    s_i = (λ_i / λ_1 + damp)^-p        pre-gains of the coordinates of a :class:`PublicBasis`

The post-gains decide what the step makes of the released coordinates:

- ``"preconditioned"``: ``t = s``. The step is that of DP-SGD on a layer whose weight is ``W' diag(s) U^t``, which sees
  inputs with even variances. All its axes can be learnt at the same rate.
- ``"original"``: ``t = 1 / s``. The released gradient is that of the layer itself, with noise that is shaped: there is
  less of it where the prior expects little.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from spectral_dp.mechanism.filters import Filter, check_choice
from spectral_dp.mechanism.gains import Gains
from spectral_dp.mechanism.public_basis import PublicBasis
from spectral_dp.mechanism.transforms import Transform, as_tuple

Scale = Literal["preconditioned", "original"]


def eigenvalue_gains(eigenvalues: Tensor, power: float, damp: float = 0.0) -> Tensor:
    """Returns ``(λ / λ_1 + damp)^-power`` of eigenvalues in falling order, ``(k,)`` in float64."""
    if not 0 <= power <= 4 or not 0 <= damp < float("inf"):
        raise ValueError(f"power must be from 0 to 4 and damp not negative, got power={power}, damp={damp}")
    values = eigenvalues.double()
    return (values / values[0] + damp) ** -power


@dataclass(frozen=True)
class EigenvalueFilter(Filter):
    """A filter that keeps the first axes of a :class:`PublicBasis`, with gains by their eigenvalues.

    Formal guarantee. Eigenvalues of a public basis are public, so the gains are fixed before any step reads data. The
    privacy loss is that of every filter; see :mod:`spectral_dp.mechanism.filters`.

    Attributes:
        power: The exponent ``p``: 0 changes nothing, 1/2 gives all axes the same deviation under the prior.
        damp: Added to the relative eigenvalues, so that small ones do not blow up what is mostly noise.
        keep: How many axes to keep, from the largest eigenvalue on. None means all.
        scale: What the post-gains are: ``"preconditioned"`` or ``"original"``, as in the module's docstring.
    """

    power: float = 0.5
    damp: float = 0.0
    keep: int | None = None
    scale: Scale = "preconditioned"
    _made: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        eigenvalue_gains(torch.ones(1), self.power, self.damp)  # wrong numbers fail where they are given
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")
        check_choice("scale", self.scale, Scale)

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Returns the gains by eigenvalue. Only a public basis has eigenvalues, so other transforms raise."""
        if not isinstance(transform, PublicBasis):
            raise ValueError(
                f"EigenvalueFilter needs the eigenvalues of a PublicBasis, which {transform.name!r} has not: give the "
                "layer an entry in input_bases, or put this filter into layers={...} for the layers that have one"
            )
        transform.check_shape(as_tuple(shape))
        last: weakref.ref[PublicBasis] | None = self._made.get("basis")
        if last is None or last() is not transform:
            self._made.update(basis=weakref.ref(transform), gains=self._gains_of(transform))
        gains: Gains = self._made["gains"]  # the same object at every step, because projections are kept for it
        return gains

    def _gains_of(self, basis: PublicBasis) -> Gains:
        if self.keep is not None and self.keep > basis.rank:
            raise ValueError(f"keep={self.keep} is more than the {basis.rank} axes of the basis")
        kept = torch.arange(basis.rank) < (self.keep or basis.rank)
        s = eigenvalue_gains(basis.eigenvalues, self.power, self.damp)
        return Gains(s * kept, (s if self.scale == "preconditioned" else 1 / s) * kept)
