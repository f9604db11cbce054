"""What draws images: a random process whose law is fixed by public settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

Shape: TypeAlias = tuple[int, ...]


class ImagePrior(ABC):
    """A law of images. Subclasses are frozen dataclasses, whose fields are the settings of the law.

    Formal guarantee. A prior has no access to any record: its images depend on its settings and on a seed only. One
    that breaks this, as a control, says so by ``is_public``, and a run with it is called not private in its statement.
    """

    #: Name of the kind of images.
    kind: ClassVar[str]

    #: Whether images depend on no private record. A run with a prior that is not public is not private.
    is_public: ClassVar[bool] = True

    #: What a privacy statement says of where the images of a prior of one's own come from.
    assumption: ClassVar[str] = "they are of the user's own prior, who vouches that no private record was read for it"

    #: Version of the images that the settings give: another version is another prior.
    version: ClassVar[int] = 1

    @abstractmethod
    def draw(self, count: int, shape: Shape, generator: torch.Generator) -> Tensor:
        """Returns independent images ``(count, C, H, W)`` in float32, with pixels from 0 to 1.

        Args:
            count: Number of images.
            shape: Shape ``(C, H, W)`` of an image.
            generator: The source of all randomness, on the CPU.
        """

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that decides the images but the seed, as plain values for JSON."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # every subclass is a dataclass
        return {"kind": self.kind, **fields, "version": self.version}


def uniform(generator: torch.Generator, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Returns independent uniform numbers from ``low`` to ``high``."""
    return torch.rand(shape, generator=generator).mul_(high - low).add_(low)


def slightly_blurred(images: Tensor, amount: Tensor) -> Tensor:
    """Returns a mixture of images ``(N, C, H, W)`` and their blurred version, by amounts ``(N, 1, 1, 1)`` from 0 to 1.

    The blur is the binomial kernel (1, 2, 1) / 4 along both axes. Pixels beyond the edge repeat those of the edge.
    """
    blurred = images
    for dim in (-1, -2):
        size = blurred.shape[dim]
        first, last = blurred.narrow(dim, 0, 1), blurred.narrow(dim, size - 1, 1)
        before = torch.cat([first, blurred.narrow(dim, 0, size - 1)], dim)
        after = torch.cat([blurred.narrow(dim, 1, size - 1), last], dim)
        blurred = before.add_(after).mul_(0.25).add_(blurred, alpha=0.5)
    return images.lerp(blurred, amount)
