"""What computes features: a fixed function of one image, described well enough that two caches can be told apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, ClassVar, Protocol, TypeAlias

from torch import nn

Shape: TypeAlias = tuple[int, ...]


class Extractor(Protocol):
    """A frozen front end: scattering, a pretrained network, a dictionary of patches.

    Formal guarantee. Features cost no privacy budget, under these assumptions:

    - The function is fixed: nothing in it was computed from the private records. Its settings are public.
    - It treats records independently: the features of a record are a function of that record alone. One record is
      tried before anything is cached, and an extractor that fails there is refused. That is no proof.

    An extractor must be picklable, because the processes that compute features each build a module of their own.
    """

    @property
    def name(self) -> str:
        """A short name, which becomes part of the name of a directory."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything that decides the features, as plain values for JSON: equal settings mean equal features."""

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns the shape of the features of one record of this shape.

        Raises:
            FeatureError: If records of this shape have no such features. The message says which shapes do.
        """

    def module(self, input_shape: Shape) -> nn.Module:
        """Returns the module that computes features, ``(B, *input_shape) -> (B, *output_shape)``, in evaluation mode.

        Its input is what is extracted from: for images, bytes from 0 to 255. It may say in an attribute
        ``rows_at_once`` how many records it is best given together, which decides the time and nothing else.
        """


class FixedExtractor(ABC):
    """An :class:`Extractor` of this package: a dataclass, whose fields are its settings unless it says otherwise."""

    #: Version of the numbers that come out: another version is another cache.
    version: ClassVar[int] = 1

    @property
    def settings(self) -> Mapping[str, Any]:
        """The fields and the version."""
        return {**asdict(self), "version": self.version}  # type: ignore[call-overload]  # every subclass is a dataclass

    @abstractmethod
    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns the shape of the features of one record."""

    def module(self, input_shape: Shape) -> nn.Module:
        """Returns the module that computes features of records of this shape, or refuses the shape."""
        self.output_shape(input_shape)
        return self._module(input_shape).eval()

    @abstractmethod
    def _module(self, input_shape: Shape) -> nn.Module:
        """Returns the module, for a shape that has features."""
