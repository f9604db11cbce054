"""What is released of one layer: the filter, its transform, and the axes that they act on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from spectral_dp.mechanism.filters import Filter, IdentityFilter
from spectral_dp.mechanism.transforms import TransformName

Support = Literal["kernel", "signal"]


@dataclass(frozen=True)
class LayerConfig:
    """What is released of one layer.

    Attributes:
        filter: Gains of the coordinates.
        transform: Name of the transform; the layer kind's own default where None.
        support: For convolutions, whether the spectrum is that of the kernel (default) or, as in the paper's
            Algorithm 2, that of the padded input.
        input_layout: For dense layers fed by an image or a sequence: the shape ``(C, H, W)`` or ``(L,)`` that was
            flattened into their input. Their gradient is then filtered over the spectrum of that input.
    """

    filter: Filter = field(default_factory=IdentityFilter)
    transform: TransformName | None = None
    support: Support = "kernel"
    input_layout: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.support not in ("kernel", "signal"):
            raise ValueError(f"unknown support {self.support!r}: choose 'kernel' or 'signal'")
