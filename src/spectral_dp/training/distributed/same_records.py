"""Makes sure that all ranks list the same records in the same order, so that no record is in two shards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from spectral_dp.training.distributed.ranks import Ranks
from spectral_dp.training.records import places
from spectral_dp.training.rehearsal.aside import generators_kept, seed_everything
from spectral_dp.training.rehearsal.twins import content

#: How many records are compared. They are spread evenly over the dataset, from the first to the last one.
COMPARED = 32

_PLACE = (
    "make_private, with the records (all ranks list the same ones in the same order: seed random_split alike, sort the "
    "names of files, leave the division among ranks to the loader)"
)


def require_same_records(ranks: Ranks, dataset: Dataset[Any], read: Callable[[Sequence[int]], list[Any]]) -> None:
    """Compares the number of records, which ones a ``Subset`` chooses, and some of the records, of all ranks.

    Ranks that list the records in different orders toss two coins for some of them: such a record is in two shards,
    moves the sum by up to twice the bound, and is drawn at more than the sampling rate.

    Records that are augmented at random are read from the same seed everywhere. If two readings differ even so, because
    a dataset has a generator of its own, their content cannot be compared, and only the rest is.

    Args:
        ranks: The ranks of the run.
        dataset: The records.
        read: A function that returns the records with given indices.

    Raises:
        RanksError: If two ranks have other records, or the same ones in another order.
    """
    # Errors show the digests. Without the key, which is never shown, nobody can find out records by trying them.
    key = ranks.of_first(lambda: os.urandom(16), "make_private")
    size, chosen = len(dataset), places(dataset)  # type: ignore[arg-type]
    first, second = (digest_of_records(size, read, key) for _ in range(2))
    vary = ranks.meet("make_private", flag=first != second).flag
    facts = {"records": size, "digest of some of them": None if vary else first}
    if chosen is not None:
        facts["digest of their indices"] = hashlib.blake2b(chosen.tobytes(), key=key, digest_size=16).hexdigest()
    ranks.meet(_PLACE, facts)


def digest_of_records(size: int, read: Callable[[Sequence[int]], list[Any]], key: bytes) -> str:
    """Returns a digest of some records, which only those who have the key can compute.

    Args:
        size: The number of records.
        read: A function that returns the records with given indices.
        key: The key of the digest.
    """
    chosen = sorted({round(i * (size - 1) / (COMPARED - 1)) for i in range(COMPARED)})
    digest = hashlib.blake2b(key=key, digest_size=16)
    with generators_kept():
        seed_everything(0)
        for record in read(chosen):
            for leaf in content(record):
                described, held = _as_bytes(leaf)
                digest.update(f"{described} {len(held)}\n".encode())
                digest.update(held)
    return digest.hexdigest()


def _as_bytes(leaf: Any) -> tuple[str, bytes]:
    """Returns the kind of a part of a record, and its content as far as it can be read."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.cpu().contiguous().view(-1).view(torch.uint8)
        return f"{leaf.dtype} {tuple(leaf.shape)}", flat.numpy().tobytes()
    if leaf is None or isinstance(leaf, str | bytes | int | float):
        return type(leaf).__name__, repr(leaf).encode()
    if hasattr(leaf, "__array__") or hasattr(leaf, "__array_interface__"):  # arrays, and images of PIL
        array = np.asarray(leaf)
        if array.dtype != object:  # whose bytes are addresses
            return f"{array.dtype} {array.shape}", array.tobytes()
    return type(leaf).__name__, b""
