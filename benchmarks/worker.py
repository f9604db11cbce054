"""The process of one contestant: it makes the steps it is told to, and says how long they took and what they needed.

It answers in JSON, a line each: when its libraries are loaded and warm; when, told to begin, it has made a first step;
and whenever it has made as many steps as a line on standard input says. Its peak memory is its own, counted from where
it begins. It may use the memory that is free then, and no more: a step that needs more fails at once instead of
driving the machine into swapping.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import IO, Any

Step = Callable[[], None]
_LEFT_FREE = 0.1  # of the memory that is free: for the others, who wait their turn but may have grown
_NO_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "could not create a memory", "not enough memory")


def serve(
    make: Callable[[], Step],
    requests: IO[str],
    answers: IO[str],
    most_mb: float | None = None,
    now: Callable[[], float] = perf_counter,
) -> None:
    """Waits for a first request, any line, and begins; the last answer may be a failure. ``now`` is the clock."""

    def answer(**facts: Any) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    answer()
    requests.readline()
    try:
        started_with = _settled_mb()
        _limit_memory(_free_mb() * (1 - _LEFT_FREE) if most_mb is None else most_mb)
        step = make()
        _settled_mb()  # what it took to build the model is over, and not part of training
        answer(seconds=_timed(step, 1, now), memory_mb=_peak_mb() - started_with)
        for line in requests:
            answer(seconds=_timed(step, int(line), now), memory_mb=_peak_mb() - started_with)
    except (MemoryError, RuntimeError) as error:
        if not is_lack_of_memory(error):
            raise
        answer(failure="out of memory")


def is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in _NO_MEMORY)


def _timed(step: Step, steps: int, now: Callable[[], float]) -> float:
    began = now()
    for _ in range(steps):
        step()
    return (now() - began) / steps


def _settled_mb() -> float:
    """Gives back what is not in use, forgets the peak so far, and returns what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    return _status_mb("VmRSS")


def _peak_mb() -> float:
    return _status_mb("VmHWM")


def _status_mb(field: str) -> float:
    return _kilobytes(Path("/proc/self/status"), field) / 2**10


def _free_mb() -> float:
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable") / 2**10


def _kilobytes(file: Path, field: str) -> int:
    return int(file.read_text().split(f"{field}:")[1].split()[0])


def _limit_memory(more_mb: float) -> None:
    limit = int((_status_mb("VmSize") + more_mb) * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(spec: dict[str, Any]) -> None:
    # Answers go where standard output went; what libraries print must not come between them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from contestants import CONTESTANTS
    from workloads import Workload

    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    contestant, work = CONTESTANTS[spec["contestant"]], Workload(**spec["workload"])
    # Imports on demand, thread pools and the like are the libraries', not the model's: a rehearsal brings them in.
    for small in ("mlp", "conv stack", "transformer", *([work.model] if work.is_of_sequences else [])):
        contestant(replace(work, model=small, batch_size=2, width=max(8, work.block_size or 0)))()
    clock = process_time if spec["clock"] == "cpu" else perf_counter
    serve(lambda: contestant(work), sys.stdin, answers, spec["most_mb"], clock)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
