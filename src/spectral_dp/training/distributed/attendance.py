"""Keeps track of which ranks arrived at a collective operation, so that an error can name the one that did not.

When a rank ends, the others only see a closed connection or a timeout, which names nobody. So every rank writes into
the store of the process group where it is, before it waits for the others. After a failure the survivors read it.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

#: How long a survivor waits for the words of others, in seconds. The store answers in milliseconds.
GRACE = 2.0

_POLL = 0.05


class _Status(NamedTuple):
    """What a rank wrote: how many operations it has reached, which is the last, and whether it noticed a failure."""

    reached: int
    place: str
    has_noticed: bool


class Attendance:
    """The whereabouts of all ranks, in the store of their process group.

    Args:
        store: The store of the group.
        rank: The rank of this process.
        size: The number of ranks.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may keep the store when it restarts ranks
        self._store, self._rank, self._size = PrefixStore(f"spectral-dp {life}", store), rank, size
        self._here = _Status(0, "the start", False)

    def arrive(self, place: str) -> None:
        """Writes down that this rank has reached another operation."""
        self._here = _Status(self._here.reached + 1, place, False)
        self._write()

    def tell(self, cause: str) -> None:
        """Writes down why this rank ends. The others will quote it."""
        self._store.set(f"cause {self._rank}", cause)

    def explanation(self) -> str:
        """Returns what is known of the other ranks after an operation failed."""
        try:
            behind = {rank: status for rank, status in self._others().items() if self._is_behind(status)}
            self._here = self._here._replace(has_noticed=True)
            self._write()
            until = time.monotonic() + GRACE
            while not (causes := self._causes()) and not behind and self._silent() and time.monotonic() < until:
                time.sleep(_POLL)
            silent = self._silent()
        except Exception as error:  # stores raise several kinds
            return (
                f"the store of the group cannot be reached, either ({type(error).__name__}): the process that holds "
                "it (rank 0, or torchrun on its machine) is gone"
            )
        if causes:
            return "; ".join(f"rank {rank} ended with {cause}" for rank, cause in causes.items())
        if behind:
            named = ", ".join(f"rank {rank} ({_whereabouts(status)})" for rank, status in behind.items())
            return f"{named} did not arrive: it was killed, or is too slow, or its loop went another way"
        if silent:
            return f"{', '.join(f'rank {rank}' for rank in silent)} was lost during the operation"
        return "all ranks arrived, so the network between them failed"

    def _write(self) -> None:
        reached, place, has_noticed = self._here
        self._store.set(f"at {self._rank}", f"{reached} {int(has_noticed)} {place}")

    def _others(self) -> dict[int, _Status | None]:
        return {rank: self._read(rank) for rank in range(self._size) if rank != self._rank}

    def _silent(self) -> list[int]:
        """Returns the other ranks that have not noticed the failure."""
        return [rank for rank, status in self._others().items() if status is None or not status.has_noticed]

    def _read(self, rank: int) -> _Status | None:
        if not self._store.check([f"at {rank}"]):
            return None
        reached, has_noticed, place = self._store.get(f"at {rank}").decode().split(" ", 2)
        return _Status(int(reached), place, has_noticed == "1")

    def _causes(self) -> dict[int, str]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        told = [rank for rank in others if self._store.check([f"cause {rank}"])]
        return {rank: self._store.get(f"cause {rank}").decode() for rank in told}

    def _is_behind(self, status: _Status | None) -> bool:
        return status is None or status.reached < self._here.reached


def _whereabouts(status: _Status | None) -> str:
    return f"last seen at {status.place}" if status else "never seen"
