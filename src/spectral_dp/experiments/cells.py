"""Many training runs, each in a process of its own: what comparisons and the paper's tables are made of.

A process of its own measures its own peak memory, and takes nothing with it if it dies. Finished runs are never run
again, interrupted ones are resumed, so whatever is stopped can be started again with the same command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import Settings
from spectral_dp.files import write_json

_POLL = 0.1  # seconds between looks at the processes


class CellsFailed(RuntimeError):
    """Some runs failed; the others are kept."""


@dataclass(frozen=True)
class CellsProgress:
    """How far a set of runs is: finished ones, all, and the share done of each that is running."""

    finished: int
    total: int
    running: Mapping[str, float]


def run_cells(
    cells: Mapping[str, Settings],
    root: Path,
    *,
    jobs: int = 1,
    show: Callable[[CellsProgress], None] = lambda _: None,
) -> dict[str, RunDirectory]:
    """Runs every cell in ``root / name`` and returns the finished runs by name.

    Args:
        cells: Settings by the name of the run, a relative path.
        root: The directory of all of them.
        jobs: How many to run at a time; the processor's cores are shared out among them.
        show: Called now and then.

    Raises:
        CellsFailed: After all others are done, if runs failed; says which, and why.
    """
    directories = {name: RunDirectory(root / name) for name in cells}
    waiting = [name for name, settings in cells.items() if not _is_done(directories[name], settings)]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failures: dict[str, str] = {}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ExitStack() as stack:
        stack.callback(_stop, running)
        stack.enter_context(_terminable())
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                running[name] = _start(name, cells[name].resolved(), directories[name], root, threads)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if running.pop(name).returncode != 0:
                    failures[name] = _last_words(_log(root, name))
            finished = len(cells) - len(waiting) - len(running) - len(failures)
            shares = {name: len(directories[name].metrics()) / _evaluations(cells[name]) for name in running}
            show(CellsProgress(finished, len(cells), shares))
            time.sleep(_POLL)
    if failures:
        listed = "\n  - ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise CellsFailed(f"{len(failures)} of {len(cells)} runs failed, the others are kept:\n  - {listed}")
    return directories


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM end this process as Ctrl-C does, so that the processes it started do not go on without it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_done(directory: RunDirectory, settings: Settings) -> bool:
    return directory.is_finished and directory.exists and directory.settings() == settings.resolved()


def _start(name: str, settings: Settings, directory: RunDirectory, root: Path, threads: int) -> subprocess.Popen[bytes]:
    log = _log(root, name)
    log.parent.mkdir(parents=True, exist_ok=True)
    config = log.with_suffix(".json")
    write_json(config, settings.to_dict())
    options = ["train", "--config", config, "--out", directory.path, "--resume", "--or-begin", "--quiet"]
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ  # which the user may have set
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "spectral_dp", *map(str, options)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _stop(running: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Asks every process to save and stop, and waits for it; none are left when all went well."""
    for process in running.values():
        process.terminate()
    for process in running.values():
        process.wait()


def _log(root: Path, name: str) -> Path:
    return root / ".logs" / f"{name.replace('/', '.')}.log"


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["it said nothing"])[-1] + f" (see {log})"


def _evaluations(settings: Settings) -> int:
    return -(-settings.epochs // settings.evaluate_every)
