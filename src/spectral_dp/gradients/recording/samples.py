"""Whose a row is: how the rows of a tensor belong to the samples of a batch, told by what a smaller batch makes of it.

A tensor of ``n`` rows in a batch of ``B`` samples may hold one row of each, ``k`` rows of each side by side (windows of
an image), ``k`` blocks of ``B`` rows (the same, transposed), or something that has nothing to do with the samples
(positions), however long that is. One look at its shape cannot tell these apart: a table of ``B`` positions looks like
``B`` samples. So a few samples are run twice, the second time without the first of them:

* what is the same in both is *shared*: it does not depend on the samples;
* what has lost its first ``k`` of ``k b`` rows, and nothing else, holds ``k`` *rows* of each sample, side by side;
* anything else cannot be told, and is refused by whoever needs to know.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils._pytree import tree_leaves, tree_map

Relation: TypeAlias = Literal["shared", "rows", "unknown"]

#: How far two runs of one sample may be apart, relative to the largest number, as they may be rounded otherwise: at
#: least so far, and so many units of the arithmetic.
_ROUNDING, _UNITS = 1e-3, 8


def number_of_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any], expected: int | None = None) -> int | None:
    """Returns how many samples a model was called with: the length of its first tensor argument, or of a packed one.

    Formal guarantee. Where this is not the number of samples, nothing is released: the number of gradients that are
    found is compared with what the loader handed out. Taken for one, samples would be clipped as one, together.

    Args:
        args: Of the call.
        kwargs: Of the call.
        expected: How many are at hand: if any argument has as many rows, there are as many samples.

    Returns:
        The number, or None where no argument is a tensor with a first dimension. Also None where the first is a single
        row and others have more: it may be one sample, or what all samples share (a time step).
    """
    leaves = tree_leaves((args, dict(kwargs)), is_leaf=is_packed)
    lengths = [_length(v) for v in leaves if is_packed(v) or (isinstance(v, Tensor) and v.ndim > 0)]
    if expected in lengths:
        return expected
    return None if not lengths or (lengths[0] == 1 and max(lengths) > 1) else lengths[0]


def some_samples(value: Any, samples: int, rows: slice) -> Any:
    """Returns arguments with these samples only, in copies that a run may write."""

    def of(leaf: Any) -> Any:
        if is_packed(leaf):
            chosen = unpack_sequence(leaf)[rows] if _length(leaf) == samples else unpack_sequence(leaf)
            return pack_sequence([sequence.detach() for sequence in chosen], enforce_sorted=False)
        if not isinstance(leaf, Tensor):
            return leaf
        return (leaf[rows] if leaf.ndim > 0 and len(leaf) == samples else leaf).detach().clone()

    return tree_map(of, value, is_leaf=is_packed)


def is_packed(value: Any) -> bool:
    """Returns whether a value is a packed sequence, which pytree would take apart."""
    return isinstance(value, PackedSequence)


def _length(value: Any) -> int:
    return int(value.batch_sizes[0]) if is_packed(value) else len(value)


def relation(whole: Tensor, rest: Tensor, samples: int, precision: float = 0.0) -> Relation:
    """Returns how a tensor belongs to the samples of a batch.

    Args:
        whole: Of a batch of ``samples`` samples.
        rest: The same of that batch without its first sample.
        samples: At least two.
        precision: The unit of the coarsest arithmetic that it was computed in.
    """
    tolerance = max(_ROUNDING, _UNITS * precision)
    if whole.shape == rest.shape:
        return "shared" if _equal(whole, rest, tolerance) else "unknown"
    if whole.ndim == 0 or whole.ndim != rest.ndim or whole.shape[1:] != rest.shape[1:]:
        return "unknown"
    k = len(whole) // samples
    if k == 0 or (len(whole), len(rest)) != (k * samples, k * (samples - 1)) or not _equal(whole[k:], rest, tolerance):
        return "unknown"
    # Only a proof if no other order of the rows, k = outer x inner around the samples, would look the same.
    for outer in (d for d in range(2, k + 1) if k % d == 0):
        other = whole.unflatten(0, (outer, samples, k // outer))[:, 1:].flatten(0, 2)
        if _equal(other, rest, tolerance):
            return "unknown"
    return "rows"


def relation_of_lengths(whole: Sequence[int], rest: Sequence[int], samples: int) -> Relation:
    """As :func:`relation`, by shapes alone: for arguments of an operation whose result is looked at closely."""
    if whole == rest:
        return "shared"
    k = whole[0] // samples if whole else 0
    return "rows" if k and rest and (whole[0], rest[0]) == (k * samples, k * (samples - 1)) else "unknown"


def _equal(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
    finite = a.isfinite() & b.isfinite()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    zero = torch.zeros_like(a)
    a, b = a.where(finite, zero), b.where(finite, zero)
    largest = float(b.abs().max()) if b.numel() else 0.0
    return bool(((a - b).abs() <= tolerance * largest).all())


def keywords_of_call(module: nn.Module) -> dict[str, Any] | None:
    """Returns the keyword arguments that a module is being called with, for a hook that torch does not give them to.

    Process-wide hooks before a forward pass get the positional arguments only. None if the call is not found.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch_module.__file__ and frame.f_locals.get("self") is module:
            keywords = frame.f_locals.get("kwargs")
            if isinstance(keywords, dict):
                return dict(keywords)
        frame = frame.f_back
    return None


def calls_under_way(module: nn.Module) -> int:
    """Returns how many calls of a module have begun and not ended; more than one if it calls itself."""
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_call = code.co_name == "_call_impl" and code.co_filename == torch_module.__file__
        calls += is_call and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls
