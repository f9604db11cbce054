"""The configuration of what is released of one layer: the filter, its transform, and their axes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spectral_dp.mechanism.filters import Filter, IdentityFilter
from spectral_dp.mechanism.public_basis import PublicBasis
from spectral_dp.mechanism.transforms import TransformName

Support = Literal["kernel", "signal"]


@dataclass(frozen=True)
class LayerConfig:
    """What is released of one layer.

    Attributes:
        filter: The filter, which gives the gains of the coordinates.
        transform: The name of the transform. None means the default of the kind of layer.
        support: For convolutions: ``"kernel"`` filters the spectrum of the kernel, and ``"signal"`` that of the padded
            input, as in the paper's Algorithm 2.
        input_layout: For dense layers after an image or a sequence: the shape ``(C, H, W)``, ``(C, L)`` or ``(L,)`` of
            their input before it was flattened. The gradient is then filtered over the spectrum of that input. For
            convolutions with signal support: the shape of the input.
        input_basis: For dense layers: a public basis in which their input is expressed. The gradient is then filtered
            over the axes of the basis. The transform is the basis itself.
    """

    filter: Filter = field(default_factory=IdentityFilter)
    transform: TransformName | None = None
    support: Support = "kernel"
    input_layout: tuple[int, ...] | None = None
    input_basis: PublicBasis | None = None

    def __post_init__(self) -> None:
        if self.input_basis is not None and not isinstance(self.input_basis, PublicBasis):
            raise TypeError(
                f"input_basis is a PublicBasis, got {type(self.input_basis).__name__}: a Spectrum has one, as_basis()"
            )
        if self.input_basis is not None and (self.input_layout is not None or self.transform is not None):
            raise ValueError(
                "an input basis is the transform of a layer's whole input: leave input_layout and transform out, or "
                "the input basis"
            )
        if self.support not in ("kernel", "signal"):
            raise ValueError(f"unknown support {self.support!r}: choose 'kernel' or 'signal'")
