"""Poisson batches: at every step, an independent coin decides for each record whether it takes part.

Formal guarantee. A logical step of :class:`PoissonLoader` contains each record with probability
``sample_rate = q = batch_size / len(dataset)`` (to within 2⁻⁶⁴, never more), independently of all other records and of
all other steps. Steps can be accounted at rate ``q`` (amplification by Poisson sampling: Mironov, Talwar, Zhang 2019)
under these assumptions, of which the loader itself ensures the first two:

* No batch is rejected, drawn again, cut or filled up. An empty batch is passed on as a batch of length zero, and its
  step still adds noise. A large batch is split into several physical batches of *one* step, which adds noise once.
* Nobody can tell which records were drawn: the coins are those of :class:`~spectral_dp.training.coins.SecureCoins`.
* The sum is divided by the *expected* batch size, which is public. The actual size is as secret as the records. To
  divide by it, or to print or log it, would be a release that is not accounted for.
* The number of records is public, because it determines ``q``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler, default_collate

from spectral_dp.training.coins import Coins, SecureCoins
from spectral_dp.training.records import by_index, number_of_records, refuse_repeated_records, without_records

_RARELY_EMPTY = 32  # from this expected size on, empty batches (probability about e^-32) can be neglected
# Settings of a DataLoader that are kept: those without effect on privacy (`in_order=False` would mix logical steps).
_WORKERS = ("num_workers", "worker_init_fn", "prefetch_factor", "persistent_workers", "multiprocessing_context")
_AS_WORKERS = ("worker_init_fn", "multiprocessing_context", "timeout")
_KEPT = (*_WORKERS, "generator", "timeout", "pin_memory")


@dataclass(frozen=True)
class PhysicalBatch:
    """The description of a physical batch.

    Attributes:
        size: The number of records in the batch. It is secret; see the guarantee of this module.
        is_last: Whether the batch completes its logical step, so that the noise is added after it.
        step: The ``(epoch, step)`` of its logical step.
        piece: The number of the batch within its logical step, counted from 0.
        is_rehearsal: Whether the batch belongs to a rehearsal of the training loop (see ``rehearsal/``). Such a batch
            belongs to no step, and nothing of it is released.
    """

    size: int
    is_last: bool
    step: tuple[int, int]
    piece: int = 0
    is_rehearsal: bool = False


class _HandsOut(DataLoader[Any]):
    """The base class of both loaders, with the functions that they call before and after a batch.

    Both loaders are instances of ``DataLoader`` and have its attributes, but only their own ``__iter__`` gives batches.

    Attributes:
        current: The description of the last batch; None before the first one.
        stop_when: A function that is called before every logical step. If it returns true, the iteration ends.
        rehearse: A function that yields the size and the content of each batch of a rehearsal, which come before the
            first step. Its argument is the largest size of a batch.
        settle: A function that is called with the description of each batch when the loop asks for the next one.
    """

    current: PhysicalBatch | None
    stop_when: Callable[[], bool]
    rehearse: Callable[[int | None], Iterable[tuple[int, Any]]]
    settle: Callable[[PhysicalBatch], None]

    def _ask_nobody(self) -> None:
        self.current, self.stop_when, self.rehearse, self.settle = None, _never, _nothing, _ignore

    def require_current(self) -> PhysicalBatch:
        """Returns :attr:`current`. Raises ``RuntimeError`` before the first batch."""
        if self.current is None:
            raise RuntimeError(
                "step() before a batch was drawn from the loader that make_private returned: iterate over that one, "
                "not over the DataLoader it was made from, whose batches are not what the ledger accounts for"
            )
        return self.current

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Returns single records. If the loader has workers, a worker reads them.

        A dataset may open its files when a worker starts. A file that this process opened would be shared by all
        workers that are forked from it later.
        """
        if not self.num_workers:
            return [self.dataset[i] for i in indices]
        options: dict[str, Any] = {name: getattr(self, name) for name in _AS_WORKERS}
        return list(
            DataLoader(self.dataset, batch_size=None, sampler=indices, collate_fn=_as_it_is, num_workers=1, **options)
        )

    def _hand_out(self, batch: Any, description: PhysicalBatch) -> Iterator[Any]:
        self.current = description
        yield batch
        self.settle(description)

    def _rehearsals(self, step: tuple[int, int], max_batch_size: int | None) -> Iterator[Any]:
        for piece, (size, batch) in enumerate(self.rehearse(max_batch_size)):
            yield from self._hand_out(batch, PhysicalBatch(size, False, step, piece, is_rehearsal=True))

    def collate(self, records: list[Any]) -> Any:
        """Returns a batch of these records. Without records, it is a batch of the usual shapes with no rows."""
        return self.collate_fn(records) if records else self._empty_batch()

    def _empty_batch(self) -> Any:
        one, two = ([self.dataset[0] for _ in range(n)] for n in (1, 2))  # not shared: a collate_fn may change them
        return without_records(self.collate_fn(one), self.collate_fn(two))


class PoissonLoader(_HandsOut):
    """A :class:`torch.utils.data.DataLoader` that draws Poisson batches (see the guarantee of this module).

    ``len(loader)`` is the number of *logical* steps of an epoch, ``ceil(1 / sample_rate)``. Iteration yields the
    physical batches of these steps in order: one for each step, or several if the batch is larger than
    ``max_physical_batch_size``. :attr:`current` describes the batch that was yielded last. In a run that an engine made
    private, the first iteration begins with the small batches of a rehearsal.

    >>> from torch.utils.data import TensorDataset
    >>> loader = PoissonLoader(TensorDataset(torch.arange(10.0)), batch_size=4, max_physical_batch_size=2)
    >>> len(loader), loader.sample_rate
    (3, 0.4)
    >>> sum(loader.current.is_last for (x,) in loader)
    3

    Args:
        dataset: Any map-style dataset.
        batch_size: The expected size of a logical batch, at most ``len(dataset)``.
        max_physical_batch_size: The largest number of records to load at once. It does not change what is released.
        coins: The source that decides which records take part in a step. None means :class:`SecureCoins`.
        like: A ``DataLoader`` whose ``collate_fn``, workers and memory pinning are used. The batches and their order do
            not depend on the workers, and ``collate_fn`` never gets an empty list of records.

    Attributes:
        coins: The source that decides which records take part in a step.
        position: The ``(epoch, step)`` of the next logical step.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: float,
        max_physical_batch_size: int | None = None,
        coins: Coins | None = None,
        like: DataLoader[Any] | None = None,
    ) -> None:
        size = number_of_records(dataset)
        if not 0 < batch_size <= size:
            raise ValueError(
                f"the expected batch size must be positive and at most the {size} records of the dataset, got "
                f"{batch_size}: set batch_size={size} to use every record at every step"
            )
        if max_physical_batch_size is not None and max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size must be at least 1 or None, got {max_physical_batch_size}")
        refuse_repeated_records(dataset)
        self._ask_nobody()
        self._batch_size = batch_size
        self.max_physical_batch_size = max_physical_batch_size
        self.coins = coins or SecureCoins()
        self.position = self._start = (0, 0)  # of the run; of the next iteration's beginning
        self._size, self._feed = size, _Feed()
        like = DataLoader(dataset) if like is None else like
        options: dict[str, Any] = {name: getattr(like, name) for name in _KEPT}
        super().__init__(dataset, batch_sampler=self._feed, collate_fn=like.collate_fn, **options)
        vars(self)["batch_size"] = batch_size  # a DataLoader refuses to set it in the usual way
        self._plain = like.collate_fn is default_collate and not (like.num_workers or like.pin_memory)
        if self.may_be_empty:
            self._empty_batch()  # if this fails, it fails now and not in the middle of a run

    @classmethod
    def from_data_loader(
        cls,
        data_loader: DataLoader[Any],
        *,
        max_physical_batch_size: int | None = None,
        coins: Coins | None = None,
    ) -> PoissonLoader:
        """Returns a Poisson loader with the dataset, batch size, collation, workers and pinning of a ``DataLoader``.

        Only the order of the records is replaced. So ``shuffle`` is ignored, and so is ``drop_last``, because no
        Poisson batch is incomplete.

        Args:
            data_loader: A loader that was made with ``batch_size`` and perhaps ``shuffle``, a loader that Opacus made,
                or a Poisson loader.
            max_physical_batch_size: See the class.
            coins: See the class.

        Raises:
            ValueError: If the loader draws its batches in another way, which Poisson sampling would replace.
        """
        return cls(
            data_loader.dataset,
            batch_size=_expected_batch_size(data_loader),
            max_physical_batch_size=max_physical_batch_size,
            coins=coins,
            like=data_loader,
        )

    @property
    def expected_batch_size(self) -> float:
        """The expected size of a logical batch: the public divisor."""
        return self._batch_size

    @property
    def is_private(self) -> bool:
        """Whether nobody can predict the batches."""
        return self.coins.is_private

    @property
    def may_be_empty(self) -> bool:
        """Whether batches are so small that a run may well draw an empty one."""
        return self._batch_size * self.coins.share < _RARELY_EMPTY

    @property
    def sample_rate(self) -> float:
        """``q``, the probability with which each record takes part in a step; for the accountant."""
        return self._batch_size / self._size

    def __len__(self) -> int:
        return math.ceil(round(self._size / self._batch_size, 9))  # rounded: N / (N * (1 / 49)) is a little above 49

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises an iterator of its own
        self.position = self._start
        if not self.stop_when():
            yield from self._rehearsals(self._start, self.max_physical_batch_size)
        epoch, step = self.position = self._start  # read only now: the loop may have read an epoch meanwhile
        self._start = (epoch + 1, 0)  # an epoch that is broken off is over: its coins are not used again
        plan, ahead = itertools.tee(self._draw(epoch, step))  # workers prefetch, so loading runs ahead of the plan
        loaded = self._load(indices for indices, _ in ahead if len(indices))
        piece = 0
        for indices, is_last in plan:
            if piece == 0 and self.stop_when():
                return
            batch = next(loaded) if len(indices) else self._empty_batch()
            description = PhysicalBatch(len(indices), is_last, (epoch, step), piece)
            piece += 1
            if is_last:
                step, piece = step + 1, 0
                self.position = (epoch, step) if step < len(self) else (epoch + 1, 0)
            yield from self._hand_out(batch, description)

    def _draw(self, epoch: int, first_step: int) -> Iterator[tuple[NDArray[np.intp], bool]]:
        """Yields the indices of each physical batch, and whether it is the last of its logical step."""
        tosses = self.coins.tosses(self._size, self.sample_rate, epoch, first_step)
        for drawn in itertools.islice(tosses, len(self) - first_step):
            parts = np.array_split(drawn, math.ceil(len(drawn) / (self.max_physical_batch_size or self._size)) or 1)
            yield from ((part, i == len(parts)) for i, part in enumerate(parts, start=1))

    def _load(self, index_lists: Iterator[NDArray[np.intp]]) -> Iterator[Any]:
        if self._plain and (whole_batch := by_index(self.dataset)):  # equal to what the inner loader would give
            return map(whole_batch, map(torch.from_numpy, index_lists))
        self._feed.index_lists = (indices.tolist() for indices in index_lists)
        loaded = super().__iter__()
        self._feed.index_lists = None  # a loader that holds a generator cannot be copied or pickled
        return loaded

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next logical step. Call it between two steps.

        The key of the epoch is not saved, so nobody can compute a future batch from the state. A resumed run draws its
        remaining steps with new coins, which is equally private, because coins are independent. A seeded loader
        continues with the same batches as without the interruption.
        """
        (epoch, step), seed = self.position, self.coins.seed
        return {"epoch": epoch, "step": step, "size": self._size, "batch_size": self._batch_size, "seed": seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position: the next iteration yields only the rest of that epoch.

        Raises:
            ValueError: If the state is of a loader with another dataset size, batch size or seed.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ValueError(f"not the state of a PoissonLoader: it has {sorted(map(str, state))}, not {sorted(own)}")
        for name in ("size", "batch_size", "seed"):
            if state[name] != own[name]:
                raise ValueError(
                    f"this state was saved with {name}={state[name]!r}, but the loader has {name}={own[name]!r}: build "
                    "the loader as it was built then, or start a new one without this state"
                )
        epoch, step = state["epoch"], state["step"]
        if not (type(epoch) is type(step) is int and 0 <= epoch < 2**32 and 0 <= step < len(self)):
            raise ValueError(f"no position in epochs of {len(self)} steps: epoch {epoch!r}, step {step!r}")
        self.position = self._start = (epoch, step)


class CountingLoader(_HandsOut):
    """Passes on the batches of a ``DataLoader`` and counts their samples. Every batch is a logical step.

    Args:
        data_loader: The loader whose batches to pass on.
    """

    data_loader: DataLoader[Any]

    def __init__(self, data_loader: DataLoader[Any]) -> None:
        if isinstance(data_loader, CountingLoader):
            data_loader = data_loader.data_loader
        refuse_repeated_records(data_loader.dataset)
        vars(self).update(vars(data_loader))  # has the attributes of that loader, which makes its batches itself
        self._iterator = None  # persistent workers stay with that loader
        self._ask_nobody()
        self.data_loader = data_loader
        self._epoch = 0

    @property
    def sample_rate(self) -> float:
        """Always 1: every record takes part in every pass, and no amplification by sampling is claimed."""
        return 1.0

    @property
    def expected_batch_size(self) -> float:
        """The batch size of the loader: the public divisor."""
        return float(self.data_loader.batch_size or 0)

    def __len__(self) -> int:
        return len(self.data_loader)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises an iterator of its own
        if not self.stop_when():
            yield from self._rehearsals((self._epoch + 1, 0), self.batch_size)
        self._epoch += 1
        for step, batch in enumerate(self.data_loader):
            if self.stop_when():
                return
            size = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), 0)
            yield from self._hand_out(batch, PhysicalBatch(size, True, (self._epoch, step)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["data_loader"], name)


def _as_it_is(record: Any) -> Any:
    return record


def _never() -> bool:
    return False


def _nothing(_: int | None) -> list[tuple[int, Any]]:
    return []


def _ignore(_: PhysicalBatch) -> None:
    pass


class _Feed:
    """The batch sampler of a Poisson loader. It is kept for all epochs, because workers may be, and refilled for each.

    Only the loader can draw from it, because the ledger does not account for batches from elsewhere.
    """

    index_lists: Iterator[list[int]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        if self.index_lists is None:
            raise RuntimeError(
                "a private loader draws its batches itself, and hands out each of them once: iterate over the loader "
                "that make_private returned, not over its batch_sampler or a DataLoader made from it. For smaller "
                "physical batches give make_private max_physical_batch_size, or import BatchMemoryManager from "
                "spectral_dp.utils.batch_memory_manager"
            )
        return self.index_lists


def _expected_batch_size(data_loader: DataLoader[Any]) -> float:
    """Returns the batch size of a loader. Raises ``ValueError`` if Poisson batches cannot replace its batches."""
    if isinstance(data_loader, PoissonLoader):
        return data_loader.expected_batch_size
    size, batches = number_of_records(data_loader.dataset), getattr(data_loader, "batch_sampler", None)
    if batches is None:
        raise ValueError("a DataLoader with batch_size=None makes no batches: set batch_size")
    kind = type(batches)
    if kind.__name__ == "UniformWithReplacementSampler" and kind.__module__.startswith("opacus."):
        return float(batches.sample_rate * size)
    if kind is BatchSampler:
        kind = type(order := batches.sampler)
        once = kind is SequentialSampler or (kind is RandomSampler and not order.replacement)
        if once and len(order) == size:
            return int(batches.batch_size)
    raise ValueError(
        f"this DataLoader draws its batches with a {kind.__name__} of its own, which Poisson sampling would replace: "
        "make it with batch_size and shuffle only, and express a choice of records as a torch.utils.data.Subset"
    )
