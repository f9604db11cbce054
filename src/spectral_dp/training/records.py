"""Reads datasets as lists of records: counts them, finds repeated ones, makes whole and empty batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset


def number_of_records(dataset: Dataset[Any]) -> int:
    """Returns the number of records of a map-style dataset.

    Raises:
        TypeError: If the dataset is a stream, from which records cannot be drawn at random.
        ValueError: If the dataset is empty.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"{type(dataset).__name__} is not a map-style dataset, but Poisson sampling draws any record at any step: "
            "give a dataset with __getitem__ and __len__, e.g. read the stream into a list"
        )
    if (size := len(dataset)) == 0:
        raise ValueError("the dataset is empty, so no batch can be drawn: check the path or the filter it comes from")
    return size


def refuse_repeated_records(dataset: Dataset[Any]) -> None:
    """Raises ``ValueError`` if a record is known to be repeated: it would be clipped and counted several times."""
    if type(dataset) not in (Subset, ConcatDataset):
        return
    found = places(dataset)
    if found is not None and len(np.unique(found)) < len(found):
        raise ValueError(
            "the dataset holds some records more than once (a Subset or ConcatDataset repeats them), so one record "
            "would count several times in a batch while the guarantee is for one: list every record once, and to give "
            "some more weight, weigh their losses"
        )


def places(dataset: Dataset[Any]) -> NDArray[np.int64] | None:
    """Returns a number for each record of nested subsets and concatenations, equal for the same record; or None."""
    return _places(dataset, {})


def _places(dataset: Dataset[Any], numbers: dict[int, int]) -> NDArray[np.int64] | None:
    if type(dataset) is Subset:
        inner, chosen = _places(dataset.dataset, numbers), np.asarray(dataset.indices)
        if inner is not None and chosen.ndim == 1 and np.issubdtype(chosen.dtype, np.integer):
            return inner[chosen]
        return None
    if type(dataset) is ConcatDataset:
        parts = [_places(part, numbers) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        return None
    number = numbers.setdefault(id(dataset), len(numbers))
    return np.arange(len(dataset), dtype=np.int64) + (number << 40)


def by_index(dataset: Dataset[Any]) -> Callable[[torch.Tensor], list[torch.Tensor]] | None:
    """Returns a function that takes a whole batch by its indices, or None if the data are not all in tensors."""
    if type(dataset) is TensorDataset:
        return lambda i: [t.index_select(0, i.to(t.device)) for t in dataset.tensors]
    if type(dataset) is Subset and (of_all := by_index(dataset.dataset)):
        indices: Any = dataset.indices
        chosen: NDArray[Any] = np.array(indices.cpu().numpy() if isinstance(indices, torch.Tensor) else indices)
        # Unusual indices, such as negative ones, are left to the general DataLoader.
        if chosen.ndim == 1 and np.issubdtype(chosen.dtype, np.integer) and bool((chosen >= 0).all()):
            return lambda i: of_all(torch.from_numpy(chosen[i.numpy()].astype(np.int64)))
    return None


def without_records(one: Any, two: Any) -> Any:
    """Returns a batch without records.

    Args:
        one: A batch of one record.
        two: A batch of two records. The axis that is longer here than in ``one`` numbers the records.

    Raises:
        TypeError: If some part of the batch has no such axis.
    """
    if isinstance(one, torch.Tensor | np.ndarray):
        grown = [axis for axis, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
        if grown:
            return one[(slice(None),) * grown[0] + (slice(0),)]
    elif isinstance(one, list | tuple) and len(one) != len(two):
        return one[:0]
    elif isinstance(one, str | bytes | int | float | None) and one == two:
        return one
    elif isinstance(one, MutableMapping):  # also those that pytree does not know, such as UserDict
        empty = copy.copy(one)
        empty.update({key: without_records(one[key], two[key]) for key in one})
        return empty
    else:
        children, spec = tree_flatten(one, is_leaf=lambda node: node is not one)
        if not spec.is_leaf():
            others = tree_leaves(two, is_leaf=lambda node: node is not two)
            return tree_unflatten([without_records(a, b) for a, b in zip(children, others, strict=True)], spec)
    shape = f" of shape {tuple(one.shape)}" if hasattr(one, "shape") else ""
    raise TypeError(
        f"cannot make an empty batch: collate_fn returned a {type(one).__name__}{shape} in which no axis numbers the "
        "records. Return tensors, arrays or lists with an entry per record, in tuples, lists, dicts or classes known "
        "to torch.utils._pytree"
    )


def copied(record: Any) -> Any:
    """Returns a deep copy of a record.

    A tensor of it may be a view of a whole data set, as those of a ``TensorDataset`` are. Copying it as Python does
    would copy all of the data set, for every record. Tensors that are none are copied quicker in this way, too.
    """
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(record):
        is_plain = type(leaf) is torch.Tensor and leaf.layout is torch.strided and not leaf.requires_grad
        if is_plain and leaf.untyped_storage().nbytes() >= leaf.nbytes:
            memo[id(leaf)] = leaf.clone()
    return copy.deepcopy(record, memo)
