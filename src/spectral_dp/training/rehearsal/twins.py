"""Finds *twins*: records for which a ``collate_fn`` draws equally many random numbers.

Word dropout, crops and masked tokens draw as many random numbers as a record is long. Under the same seed, a record
beside longer mates therefore gets other random numbers. This is not coupling, because other numbers of the same
generator are equally good, but it looks the same in the gradients. Twins avoid it: each of them, collated alone from
several seeds, leaves the generators in the same state and gives tensors of the same shapes. If one takes the place of
the other, all mates keep their random numbers. Where too few records are alike, twins are made up: a record gets one
of its own length with the content of another record.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from spectral_dp.training.records import copied
from spectral_dp.training.rehearsal.aside import generator_states, generators_kept, seed_everything

_SEEDS = (1, 2, 3)  # a crop of random length draws more or less, depending on the seed


def find_twins(records: Sequence[Any], collate_fn: Callable[[list[Any]], Any], needed: int) -> list[tuple[Any, Any]]:
    """Returns pairs of different records that draw equally many random numbers, in the order of the records.

    Records of the same shape are preferred, because they draw alike from every seed. If there are too few, it is enough
    that their batches have the same shape (texts with equally many words), or else that they drew alike here. What is
    still missing is made up (:func:`resized`).

    Args:
        records: The records to choose from.
        collate_fn: The loader's function. It is called with batches of two; the global generators are restored.
        needed: The number of pairs that is enough.
    """

    def collated(record: Any, seed: int) -> list[Any]:
        seed_everything(seed)
        return content(collate_fn([copied(record), copied(record)]))

    def are_equal(one: Any, other: Any) -> bool:
        """Returns whether two records are equal, so that exchanging them would show nothing."""
        ours, theirs = collated(one, _SEEDS[0]), collated(other, _SEEDS[0])
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))

    keys: list[tuple[Hashable, ...]] = []  # keys of each record, the strictest first
    pairs: list[tuple[Any, Any]] = []

    def keys_of(record: Any) -> tuple[Hashable, ...]:
        shapes, states = [], []
        for seed in _SEEDS:
            shapes.append(_shapes(collated(record, seed)))
            states.append(generator_states())
        drawn = tuple(states)
        return (drawn, tuple(shapes), _shapes(tree_leaves(record))), (drawn, tuple(shapes)), drawn

    with generators_kept():
        keys += map(keys_of, records)
        for strictness in range(3):
            pairs = _paired(records, [key[strictness] for key in keys], are_equal)
            if len(pairs) >= needed:
                return pairs
        paired = {id(record) for pair in pairs for record in pair}
        for place, (record, key) in enumerate(zip(records, keys, strict=True)):
            if len(pairs) >= needed:
                break
            with suppress(Exception):  # whatever a collate_fn says to a record that somebody made up
                twin = resized(records[place - 1], record)
                if id(record) not in paired and keys_of(twin)[1] == key[1] and not are_equal(record, twin):
                    pairs.append((record, twin))
    return pairs


def resized(record: Any, like: Any) -> Any:
    """Returns a record with the content of one and the lengths of another, for records of the same structure.

    Tensors, arrays, lists of plain values and the words of texts are repeated, or cut off, to the length of the other.
    """
    if isinstance(record, Mapping):
        return {name: resized(value, like[name]) for name, value in record.items()}
    if isinstance(record, list) and not any(isinstance(value, list | tuple | Mapping | Tensor) for value in record):
        return [record[i % len(record)] for i in range(len(like))]
    if isinstance(record, list | tuple):
        parts = [resized(value, other) for value, other in zip(record, like, strict=True)]
        return type(record)(*parts) if hasattr(record, "_fields") else type(record)(parts)
    if isinstance(record, str):
        return " ".join(resized(record.split(), like.split()))
    if isinstance(record, Tensor | np.ndarray) and record.ndim:
        return record[[i % len(record) for i in range(len(like))]]
    return record


def _paired(
    records: Sequence[Any], keys: Sequence[Hashable], are_equal: Callable[[Any, Any], bool]
) -> list[tuple[Any, Any]]:
    """Pairs each record with an earlier one that has the same key and is not equal."""
    waiting: dict[Hashable, Any] = {}
    pairs = []
    for record, key in zip(records, keys, strict=True):
        if key not in waiting:
            waiting[key] = record
        elif not are_equal(waiting[key], record):
            pairs.append((waiting.pop(key), record))
    return pairs


def same_but_for_padding(ours: list[Any], theirs: list[Any], sizes: tuple[int, int], views: int) -> bool:
    """Returns whether the first record of two collated batches is the same, apart from padding.

    If it is, it got the same random numbers in both. Returns False also if this cannot be decided.

    Args:
        ours: The :func:`content` of one batch.
        theirs: The :func:`content` of the other batch.
        sizes: The number of records in each of them.
        views: The number of rows that a record may have.
    """
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and all(_first_rows_agree(a, b, sizes, views) for a, b in pairs)


def _first_rows_agree(ours: Any, theirs: Any, sizes: tuple[int, int], views: int) -> bool:
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        return _equal(ours, theirs)
    if ours.ndim != theirs.ndim or not ours.ndim:
        return _equal(ours, theirs)
    for rows in (1, views):
        if (len(ours), len(theirs)) == (sizes[0] * rows, sizes[1] * rows):
            ours, theirs = ours[:rows], theirs[:rows]
            break
    else:
        return False
    shape = [min(n, m) for n, m in zip(ours.shape, theirs.shape, strict=True)]
    heads = [t[tuple(slice(n) for n in shape)] for t in (ours, theirs)]
    tails = [t[tuple(slice(len_ - n, None) for len_, n in zip(t.shape, shape, strict=True))] for t in (ours, theirs)]
    return _equal(*heads) or _equal(*tails)  # padded at the end, or at the beginning


def content(batch: Any) -> list[Any]:
    """Returns the leaves of a batch, tensors as copies. Mappings that pytree does not know are opened, too."""
    leaves: list[Any] = []
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Mapping):
            leaves += content(dict(leaf))
        else:
            leaves.append(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
    return leaves


def _shapes(leaves: list[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(leaf.shape) if hasattr(leaf, "shape") else (len(leaf),) if isinstance(leaf, str | bytes) else ()
        for leaf in leaves
    )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.all((a == b) | ((a != a) & (b != b))))
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False
