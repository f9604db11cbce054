"""Starts one command as several processes of a group, as ``torchrun`` does on one machine, and waits for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

from spectral_dp.experiments.signals import handled_by

#: How long the other processes have to end by themselves after one has failed, in seconds. They notice it at once.
GRACE = 15.0

_POLL = 0.05


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process was started as one of several, by :func:`run_ranks` or by ``torchrun``."""
    return int(environment.get("WORLD_SIZE") or 1) > 1


def run_ranks(command: Sequence[str], processes: int) -> int:
    """Runs a command as so many ranks on this machine.

    The first rank has the terminal. What the others say is only shown if one of them is the first to fail. Ctrl-C and
    SIGTERM are passed on to all of them.

    Args:
        command: The program and its arguments.
        processes: The number of ranks. The processor's cores are shared out among them.

    Returns:
        The exit code of the first rank that failed, or 0.
    """
    common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    common["LOCAL_WORLD_SIZE"] = str(processes)
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}  # which the user may have set
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, processes)]
        stack.callback(_end, ranks)

        def pass_on(number: int, _: Any) -> None:
            for process in ranks:
                process.send_signal(number)

        stack.enter_context(handled_by(pass_on, signal.SIGINT, signal.SIGTERM))
        for rank, log in enumerate([None, *said]):
            own = threads | os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            hidden = {} if log is None else {"stdout": subprocess.DEVNULL, "stderr": log}
            # A session of its own: the terminal would send Ctrl-C to each of them, and we do so already.
            ranks.append(subprocess.Popen(command, env=own, start_new_session=True, **hidden))  # type: ignore[call-overload]
        failed = _wait(ranks)
        if failed > 0 and ranks[failed].returncode != ranks[0].returncode:  # else the first rank has said why
            _show(said[failed - 1], failed)
        return 0 if failed < 0 else _code(ranks[failed])


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Waits for all processes, and returns which was the first to fail, or -1. The others then have a while to end."""
    failed, until = -1, float("inf")
    while any(process.poll() is None for process in ranks) and time.monotonic() < until:
        failures = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failures and failed < 0:
            failed, until = failures[0], time.monotonic() + GRACE
        time.sleep(_POLL)
    return failed if failed >= 0 else next((rank for rank, process in enumerate(ranks) if process.poll()), -1)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.kill()
        process.wait()


def _code(process: subprocess.Popen[bytes]) -> int:
    code = process.returncode
    return code if code >= 0 else 128 - code  # as shells tell of a signal


def _show(log: IO[bytes], rank: int) -> None:
    log.seek(0)
    text = log.read().decode(errors="replace")
    words = f", and says:\n{text}" if text else " without a word: was it killed, or out of memory?\n"
    print(f"rank {rank} failed first{words}", end="", file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
