"""Samples: the rows of a batch, in whatever form a model takes one.

A batch is a tensor, a tuple of arguments or a dict of keyword arguments, nested as the model likes. Every tensor in it
has the samples in its first dimension. Anything else (a flag, a number) is the same for all samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

#: A batch as a model takes it: a tensor, the arguments, or the keyword arguments.
Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]

#: One row of every tensor of a batch.
Sample = tuple[Tensor, ...]


class InputForm:
    """The form in which a model takes its batches: takes samples out of one, and makes one of samples.

    Args:
        batch: A batch of at least one sample.
    """

    def __init__(self, batch: Batch) -> None:
        leaves, self._structure = tree_flatten(_arguments(batch))
        self._leaves = leaves  # of those without rows: what every call is given
        self._shapes = [tuple(leaf.shape[1:]) for leaf in leaves if _has_rows(leaf)]
        counts = {len(leaf) for leaf in leaves if _has_rows(leaf)}
        if len(counts) != 1 or 0 in counts:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor)) or "no tensor"
            raise ValueError(
                f"a batch must have one or more samples, as many in the first dimension of every tensor; got {shapes}"
            )

    def samples(self, batch: Batch) -> list[Sample]:
        """Returns the rows of a batch of this form."""
        leaves, structure = tree_flatten(_arguments(batch))
        rows = [leaf for leaf in leaves if _has_rows(leaf)]
        shapes = [tuple(leaf.shape[1:]) for leaf in rows]
        if structure != self._structure or shapes != self._shapes:
            raise ValueError(
                f"samples of shapes {shapes} do not fit into one batch with those of shapes {self._shapes}: give them "
                "in the same form, padded to the same length"
            )
        return [tuple(sample) for sample in zip(*rows, strict=True)]

    def call(self, model: nn.Module, samples: Sequence[Sample]) -> Any:
        """Calls a model with a batch of these samples."""
        rows = iter([torch.stack(values) for values in zip(*samples, strict=True)])
        leaves = [next(rows) if _has_rows(leaf) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return model(*args, **kwargs)


def scaled(sample: Sample, factor: float) -> Sample:
    """Returns a sample with its real numbers multiplied; whole numbers and truth values stay as they are."""
    return tuple(value * factor if value.is_floating_point() else value for value in sample)


def _arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    raise TypeError(f"a batch must be a tensor, a tuple of arguments or a dict of keywords, got {type(batch).__name__}")


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0
