"""The processes that train together, and the collective operations between them.

Every collective operation begins with a *meeting*: a small all-reduce in which each rank says where it is and what it
is about to do. So ranks that went different ways, or have different settings, end with an error that names the
difference. They do not exchange tensors of different sizes or wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from spectral_dp.errors import SpectralDPError
from spectral_dp.training.distributed.attendance import Attendance

Value = TypeVar("Value")


class RanksError(SpectralDPError, RuntimeError):
    """Raised when the ranks of a run cannot go on together. The message names the rank and the cause."""


class Meeting(NamedTuple):
    """What a meeting found.

    Attributes:
        ranks: The number of ranks that were there: the sum of a 1 from each of them.
        flag: Whether any rank raised its flag.
    """

    ranks: int
    flag: bool


class Ranks:
    """The ranks of the default process group, seen from one of them.

    All ranks must call the methods in the same order. If they do not, every rank gets a :class:`RanksError`. If a rank
    is gone, the others get the error as soon as the connection closes, or after the ``timeout`` that was given to
    ``init_process_group``. After an error, every further call raises it again.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.
        device: The device on which the group can add tensors, if the tensors themselves are elsewhere.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = _device()
        # Private, but the only way to the store that init_process_group made; used for words after a failure.
        self._attendance = Attendance(dist.distributed_c10d._get_default_store(), self.rank, self.size)
        # Weakly: else the connections would outlive destroy_process_group(), and the others would wait for this rank.
        self._group: Any = weakref.ref(dist.group.WORLD)
        self._failure: str | None = None
        _tell_of_uncaught_errors(self)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files."""
        return self.rank == 0

    @property
    def is_current(self) -> bool:
        """Whether the process group is still the one that these ranks are of."""
        return dist.is_initialized() and dist.group.WORLD is self._group()

    def meet(self, place: str, facts: Mapping[str, object] | None = None, *, flag: bool = False) -> Meeting:
        """Waits for all ranks, and makes sure that they are at the same place with the same facts.

        Args:
            place: Where this rank is, in words for an error message: ``"the release of step 7"``.
            facts: What must be equal on all ranks, by name, as values with a ``repr`` that tells them apart.
            flag: A flag for all ranks. The result says whether any of them raised it.

        Raises:
            RanksError: If a rank did not come, or is elsewhere, or has other facts.
        """
        described = {name: repr(value) for name, value in (facts or {}).items()}
        table = torch.zeros(self.size, 4, dtype=torch.int64, device=self.device)
        own = [1, _digest(place), _digest(repr(sorted(described.items()))), int(flag)]
        table[self.rank] = torch.tensor(own, device=self.device)
        self._carry(place, partial(dist.all_reduce, table))
        found: Tensor = table.cpu()
        if not bool((found[:, 0] == 1).all()):
            # What was counted is not shown: it may be part of a sum that another rank sent, with too little noise.
            raise self._failed(f"at {place} not every rank was counted once: restart all of them")
        if not bool((found[:, 1:3] == found[0, 1:3]).all()):
            self._fail_by_difference(place, described)
        return Meeting(int(found[:, 0].sum()), bool(found[:, 3].any()))

    def added(self, tensors: Sequence[Tensor], ranks: int) -> list[Tensor]:
        """Returns the sum of these tensors over all ranks, which must have met just before.

        Args:
            tensors: Tensors that have the same shapes and dtypes on every rank.
            ranks: The number of ranks that met. A 1 from each rank travels with the tensors, and its sum must be this.

        Raises:
            RanksError: If a rank was lost, or others than those that met took part. No sum is returned then.
        """
        sums: dict[int, Tensor] = {}
        for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
            places = [i for i, tensor in enumerate(tensors) if (tensor.dtype, tensor.device) == kind]
            own = [tensors[i] for i in places]
            flat = torch.cat([*(tensor.reshape(-1) for tensor in own), own[0].new_ones(1)]).to(self._wire(kind[1]))
            self._carry("the sum over ranks", partial(dist.all_reduce, flat))
            if float(flat[-1]) != ranks:
                raise self._failed(f"others were added than the {ranks} ranks that had met: restart all of them")
            pieces = flat[:-1].to(kind[1]).split([tensor.numel() for tensor in own])
            sums |= {i: piece.view(tensors[i].shape) for i, piece in zip(places, pieces, strict=True)}
        return [sums[i] for i in range(len(tensors))]

    def take_over(self, tensors: Sequence[Tensor], place: str) -> None:
        """Replaces the contents of these tensors by those of rank 0."""
        for tensor in tensors:
            wire = tensor.detach().to(self._wire(tensor.device)).contiguous()
            self._carry(place, partial(dist.broadcast, wire, src=0))
            tensor.detach().copy_(wire)

    def of_first(self, make: Callable[[], Value], place: str) -> Value:
        """Calls a function on rank 0 only, and returns its value on every rank.

        Raises:
            Exception: On rank 0, whatever the function raised.
            RanksError: On the other ranks, with the same words.
        """
        self.meet(place)
        sent: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_first:
            try:
                sent = [make(), None]
            except Exception as error:
                failure, sent = error, [None, f"{type(error).__name__}: {error}"]
        self._carry(place, lambda: dist.broadcast_object_list(sent, src=0, device=self.device))
        if failure is not None:
            raise failure
        value, words = sent
        if words is not None:
            raise RanksError(f"{place} failed on rank 0: {words}")
        return value

    def of_each(self, value: Value, place: str) -> list[Value]:
        """Returns the values of all ranks, by rank. They are sent as pickles, so keep them small."""
        self.meet(place)
        found: list[Any] = [None] * self.size
        self._carry(place, lambda: dist.all_gather_object(found, value))
        return found

    def tell(self, error: BaseException) -> None:
        """Leaves a note for the other ranks that this one ends because of an error."""
        if self._failure is None and self.is_current:  # or it only repeats what another rank has caused
            self._attendance.tell(f"{type(error).__name__}: {error}")

    def _wire(self, device: torch.device) -> torch.device:
        return device if device.type == self.device.type else self.device

    def _carry(self, place: str, operation: Callable[[], object]) -> None:
        if self._failure is not None:
            raise RanksError(self._failure)
        if not self.is_current:
            raise RanksError(
                f"{place}: the process group that this run was made private in is gone or replaced. Call make_private "
                "again in the new one, and load the last checkpoint"
            )
        try:
            self._attendance.arrive(place)
            operation()
        except RuntimeError as error:  # closed connections, timeouts and aborted groups are all of this kind
            raise self._failed(
                f"rank {self.rank} of {self.size} waited at {place}, but {self._attendance.explanation()}. Nothing of "
                "this step was released here. Restart all ranks from the last checkpoint (torchrun --max-restarts "
                "does so by itself)"
            ) from error

    def _fail_by_difference(self, place: str, described: dict[str, str]) -> None:
        """Raises the error of a meeting that all ranks attended, with what they disagree about."""
        sent: list[Any] = [None] * self.size
        self._carry(place, lambda: dist.all_gather_object(sent, (place, described)))
        places = {rank: where for rank, (where, _) in enumerate(sent)}
        if len(set(places.values())) > 1:
            listed = "; ".join(f"rank {rank} is at {where}" for rank, where in places.items())
            raise self._failed(
                f"the ranks went different ways: {listed}. Every rank must run the same loop and make the same calls"
            )
        differences = []
        for rank, (_, theirs) in enumerate(sent):
            first = sent[0][1]
            for name in dict.fromkeys((*first, *theirs)):
                if first.get(name) != theirs.get(name):
                    differences.append(f"rank {rank}: {name} {theirs.get(name)}, but on rank 0 {first.get(name)}")
        listed = "\n  - ".join(differences)
        raise self._failed(
            f"at {place} the ranks differ:\n  - {listed}\nStart every rank with the same script and data"
        )

    def _failed(self, message: str) -> RanksError:
        self._failure = message
        return RanksError(message)


_known: Ranks | None = None


def current_ranks() -> Ranks | None:
    """Returns the ranks of the default process group, or None if there is only this process.

    Raises:
        ValueError: If this process was started as one of several, but they do not know each other yet.
    """
    global _known
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ValueError(
                f"this is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), but they have no process group, so "
                "each would train a model of its own on all records and spend its own budget: call "
                "torch.distributed.init_process_group() before make_private"
            )
        return None
    if dist.get_world_size() == 1:
        return None
    if _known is None or not _known.is_current:
        _known = Ranks()
    return _known


def of_first(ranks: Ranks | None, make: Callable[[], Value], place: str) -> Value:
    """Returns what the first of several processes makes, or what this one makes if it is alone."""
    return make() if ranks is None else ranks.of_first(make, place)


def _device() -> torch.device:
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.empty(0, device=torch.accelerator.current_accelerator()).device


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _tell_of_uncaught_errors(ranks: Ranks) -> None:
    """Leaves a note for the other ranks when an error ends this process, wherever in the user's loop it was raised."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            ranks.tell(error)
        finally:
            before(kind, error, traceback)

    sys.excepthook = hook
