"""Calls of layers: what a model hands to each of its layers, and what comes back, sample by sample.

Layers take and give their samples in many forms: in the first dimension, in the second (the states of an LSTM), packed,
side by side with other arguments (the mask of an attention). Which dimension is that of the samples is not assumed but
seen: it is the one that grows with the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from spectral_dp.audit.targets.samples import InputForm, Sample
from spectral_dp.gradients.recording.samples import is_packed

#: Arguments and keyword arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Seen(NamedTuple):
    """What a layer was seen to take and to give.

    Attributes:
        x: The first tensor that it was given, of one sample.
        output_shape: Shape of its first real output, of one sample; of the longest where they differ.
        output_axis: Which dimension of that output is that of the samples. None if it is the same for all samples.
        argument_axes: The same of every argument, in flat order. Fewer than arguments where their number varies.
    """

    x: Tensor
    output_shape: tuple[int, ...]
    output_axis: int | None
    argument_axes: tuple[int | None, ...]


class _Call(NamedTuple):
    arguments: list[Any]
    output: Tensor


def trace(model: nn.Module, form: InputForm, samples: Sequence[Sample]) -> dict[str, Seen]:
    """Returns what every module of a model takes and gives, by name. Modules that are not called are missing.

    Args:
        model: The model.
        form: The form in which it takes batches.
        samples: All samples that it will be called with, so that the longest outputs are known.
    """
    two, three = (_calls(model, form, [samples[0]] * n) for n in (2, 3))
    seen = {}
    for name, call in _calls(model, form, samples).items():
        tensors = [a.data if isinstance(a, PackedSequence) else a for a in two[name].arguments]
        axes = tuple(itertools.starmap(_growing, zip(two[name].arguments, three[name].arguments, strict=False)))
        axis = _growing(two[name].output, three[name].output)
        shape = list(call.output.shape)
        if axis is not None:
            del shape[axis]
        first = next((k for k, tensor in enumerate(tensors) if isinstance(tensor, Tensor)), None)
        if first is not None:
            x, at = tensors[first], axes[first]
            x = (x if at is None else x.select(at, 0)).detach().clone()
            seen[name] = Seen(x, tuple(shape), axis, axes)
    return seen


def arguments_at(model: nn.Module, layer: nn.Module, form: InputForm, samples: Sequence[Sample]) -> Arguments:
    """Returns what a layer of the model is first called with when the model is given these samples."""
    found: list[Arguments] = []
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: found.append((args, kwargs)), with_kwargs=True)
    with hook, torch.no_grad():
        form.call(model, samples)
    return found[0]


def with_gains(arguments: Arguments, axes: Sequence[int | None], gains: Tensor) -> Arguments:
    """Returns arguments in which the real numbers of sample ``b`` are multiplied by ``gains[b]``."""
    if bool((gains == 1).all()):
        return arguments
    leaves, structure = tree_flatten(arguments, is_leaf=is_packed)
    made: dict[int, Any] = {}  # queries, keys and values that are one tensor stay one
    for leaf, axis in itertools.zip_longest(leaves, axes[: len(leaves)]):
        made.setdefault(id(leaf), _gained(leaf, axis, gains))
    args, kwargs = tree_unflatten([made[id(leaf)] for leaf in leaves], structure)
    return args, kwargs


def first_output(output: Any) -> Tensor | None:
    """Returns the first tensor of real numbers of what a module gave, padded if it is packed. None if there is none."""
    for leaf in tree_flatten(output, is_leaf=is_packed)[0]:
        if isinstance(leaf, PackedSequence):
            return pad_packed_sequence(leaf, batch_first=True)[0]
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    return None


def weighed(output: Tensor, axis: int, weights: Tensor) -> Tensor:
    """Returns the sum of an output times weights ``(B, ...)``, of which each is for all rows of a sample.

    Weights are as large as the longest output, and cut off where this one is shorter.
    """
    rows = output.movedim(axis, 0)
    each = weights[(slice(None), *(slice(size) for size in rows.shape[1:]))]
    return (rows * each.to(rows.dtype).repeat_interleave(len(rows) // len(each), 0)).sum()


def _calls(model: nn.Module, form: InputForm, samples: Sequence[Sample]) -> dict[str, _Call]:
    """Returns the first call of every module that gave real numbers."""
    calls: dict[str, _Call] = {}

    def noting(name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name not in calls and (first := first_output(output)) is not None:
                calls[name] = _Call(tree_flatten((args, kwargs), is_leaf=is_packed)[0], first)

        return note

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(noting(name), with_kwargs=True))
        form.call(model, samples)
    return calls


def _growing(two: Any, three: Any) -> int | None:
    """Returns the dimension in which a tensor differs between a batch of two and one of three samples."""
    if isinstance(two, PackedSequence):
        return 0
    if not isinstance(two, Tensor) or not isinstance(three, Tensor):
        return None
    sizes = enumerate(zip(two.shape, three.shape, strict=True))
    return next((axis for axis, (a, b) in sizes if a != b), None)


def _gained(leaf: Any, axis: int | None, gains: Tensor) -> Any:
    if isinstance(leaf, PackedSequence):
        padded, lengths = pad_packed_sequence(leaf, batch_first=True)
        gained = _gained(padded, 0, gains)
        return pack_padded_sequence(gained, lengths, batch_first=True, enforce_sorted=leaf.unsorted_indices is None)
    if axis is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    rows = leaf.movedim(axis, 0)
    each = gains.to(leaf).repeat_interleave(len(rows) // len(gains))  # a sample may have several rows, side by side
    return (rows * each.view(-1, *[1] * (rows.ndim - 1))).movedim(0, axis)
