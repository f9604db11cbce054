"""Computes features into a cache, chunk by chunk, by several processes of one thread each; what is there is kept."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from spectral_dp.features import cache
from spectral_dp.features.cache import FeatureCache
from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import Extractor
from spectral_dp.features.rows import ViewsOfRows
from spectral_dp.features.views import View, view_of

Rows: TypeAlias = Tensor | FeatureCache | ViewsOfRows

_ROUNDING = 1e-2  # relative: what half precision and another order of additions may change

_ROWS_AT_ONCE = 16  # through a module that does not say: few, so that what is in between stays in the cache


@dataclass(frozen=True)
class ExtractionProgress:
    """How far the computation of a cache is: rows that are finished, and all."""

    finished: int
    total: int


def extract_features(
    rows: Rows,
    extractor: Extractor,
    root: str | os.PathLike[str],
    *,
    title: str,
    view: View = "plain",
    jobs: int = 1,
    verify: bool = False,
    show: Callable[[ExtractionProgress], None] = lambda _: None,
) -> FeatureCache:
    """Returns the cached features of some records, and computes those that are not in the cache yet.

    It can be stopped at any time: the next call with the same arguments goes on after the last finished chunk.

    Args:
        rows: The records ``(N, ...)``: images as bytes, or other features from the cache.
        extractor: What computes the features.
        root: The directory that holds the directories of all caches.
        title: What the records are called, such as ``"cifar10-train"``: part of the name of the directory.
        view: Which view of the images to compute features of.
        jobs: The number of processes, of one thread each. With 1, this process computes them itself. With more, a
            script must keep its own work behind ``if __name__ == "__main__"``, as ``multiprocessing`` asks for.
        verify: Whether to compare all rows that are there with their checksums, and to compute damaged ones again.
            Otherwise a whole cache is taken as it is, if it is of these records and settings.
        show: Called with how far the computation is, now and then.

    Raises:
        FeatureError: If records of this shape have no such features, the disk is full, the directory holds something
            else, or the records are features whose rows were changed.
    """
    description = description_of(rows, extractor, view)
    path = Path(root) / cache.directory_name(title, description)
    if not verify and cache.is_whole(path, description):
        return FeatureCache(path, description)
    with cache.claimed(path, description) as finished:
        left = [chunk for chunk in range(cache.chunk_count(description)) if chunk not in finished]
        total, done = description["shape"][0], 0
        done = sum(_size(description, chunk) for chunk in finished)
        show(ExtractionProgress(done, total))
        if left and not isinstance(rows, Tensor):
            rows.verify()  # features of damaged features would stay when these are repaired: nothing tells them apart
        for chunk, checksum in _computed(rows, extractor, path, description, left, min(jobs, len(left))):
            cache.enter_chunk(path, chunk, checksum)
            done += _size(description, chunk)
            show(ExtractionProgress(done, total))
    return FeatureCache(path, description)


def description_of(rows: Rows, extractor: Extractor, view: View = "plain") -> dict[str, Any]:
    """Returns the description of the cache that :func:`extract_features` makes of these records."""
    view_of(rows[:0], view)  # refuses what has no such view
    input_shape = tuple(rows.shape[1:])
    shape = (len(rows), *extractor.output_shape(input_shape))
    if not len(rows):
        raise FeatureError("there are no records to compute features of")
    return cache.describe(extractor.name, extractor.settings, view, cache.checksum_of(rows), input_shape, shape)


def _computed(
    rows: Rows,
    extractor: Extractor,
    path: Path,
    description: Mapping[str, Any],
    chunks: list[int],
    jobs: int,
) -> Iterator[tuple[int, int]]:
    """Yields each chunk and its checksum once it is on the disk."""
    if not chunks:
        return
    if jobs <= 1:
        worker = _Worker(extractor, path, dict(description))
        for chunk in chunks:
            yield chunk, worker.compute(chunk, rows[cache.chunk_rows(description, chunk)])
        return
    context = multiprocessing.get_context("spawn")  # not fork: torch's threads do not survive it
    pool = ProcessPoolExecutor(jobs, context, _start_worker, (extractor, path, dict(description)))
    try:
        waiting, running = iter(chunks), dict[Future[int], int]()
        while True:
            for chunk in itertools.islice(waiting, 2 * jobs - len(running)):
                part = rows[cache.chunk_rows(description, chunk)].numpy()  # pickled whole, not as shared memory
                running[pool.submit(_compute_in_worker, chunk, part)] = chunk
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise FeatureError(
            "a process that computes features ended (too little memory?): use fewer, --jobs 1; what is finished is kept"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Worker:
    """Computes chunks of one cache."""

    def __init__(self, extractor: Extractor, path: Path, description: Mapping[str, Any]) -> None:
        self._path, self._description = path, description
        self._module: nn.Module = extractor.module(tuple(description["input_shape"]))
        self._rows_at_once = int(getattr(self._module, "rows_at_once", _ROWS_AT_ONCE))
        self._is_tried = False

    @torch.inference_mode()
    def compute(self, chunk: int, rows: Tensor) -> int:
        parts = [self._module(view_of(part, self._description["view"])) for part in rows.split(self._rows_at_once)]
        if not self._is_tried:
            self._require_independence(view_of(rows[:1], self._description["view"]), parts[0])
        features = torch.cat([part.half() for part in parts])
        expected = (len(rows), *self._description["shape"][1:])
        if tuple(features.shape) != expected:
            raise FeatureError(
                f"the extractor {self._description['extractor']} said that its features have the shape "
                f"{expected[1:]}, but they have {tuple(features.shape[1:])}: correct its output_shape"
            )
        return cache.write_chunk(self._path, self._description, chunk, features)

    def _require_independence(self, record: Tensor, batch: Tensor) -> None:
        """Raises ``FeatureError`` if a record has other features alone than in its batch ``(B, ...)``."""
        alone, together = self._module(record)[0].float(), batch[0].float()
        if bool((alone - together).norm() > _ROUNDING * together.norm()):
            raise FeatureError(
                f"the extractor {self._description['extractor']} gives a record other features alone than beside other "
                "records, so these would be private statistics that nobody charges: take out what looks at the whole "
                "batch, such as BatchNorm in training mode (.eval() makes it a fixed function)"
            )
        self._is_tried = True


_worker: _Worker | None = None  # of this process, if it is one that computes


def _start_worker(extractor: Extractor, path: Path, description: Mapping[str, Any]) -> None:
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # the processes share out the cores; more threads would only wait for each other
    _worker = _Worker(extractor, path, description)


def _end_with_parent() -> None:
    """Ends this process when the one that started it is killed: the lock of the cache is free then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _compute_in_worker(chunk: int, rows: Any) -> int:
    assert _worker is not None
    return _worker.compute(chunk, torch.from_numpy(rows))


def _size(description: Mapping[str, Any], chunk: int) -> int:
    rows = cache.chunk_rows(description, chunk)
    return rows.stop - rows.start
