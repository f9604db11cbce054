"""Many training runs, each in a process of its own.

A process of its own measures its own peak memory, and takes nothing with it if it dies. Finished runs are never run
again, interrupted ones are resumed, so whatever is stopped can be started again with the same command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from spectral_dp.errors import SpectralDPError
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import ResolvedSettings
from spectral_dp.experiments.signals import handled_by
from spectral_dp.files import write_json

_POLL = 0.1  # seconds between looks at the processes


class RunsFailed(SpectralDPError, RuntimeError):
    """Some runs failed; the others are kept."""


@dataclass(frozen=True)
class RunsProgress:
    """How far a set of runs is: finished ones, all, and the share done of each that is running."""

    finished: int
    total: int
    running: Mapping[str, float]


def start_process(
    settings: ResolvedSettings, directory: RunDirectory, log: Path, threads: int
) -> subprocess.Popen[bytes]:
    """Starts a run, or goes on with it, in a process of its own whose words go to a log."""
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


def run_all(
    runs: Mapping[str, ResolvedSettings],
    root: Path,
    *,
    jobs: int = 1,
    show: Callable[[RunsProgress], None] = lambda _: None,
    start: Callable[[ResolvedSettings, RunDirectory, Path, int], subprocess.Popen[bytes]] = start_process,
    failed: Callable[[str, int], None] = lambda name, code: None,
) -> None:
    """Makes every run that is not finished, in ``root / name``.

    Args:
        runs: The settings of each run, by its name.
        root: The directory that holds the directories of all runs.
        jobs: How many runs to make at a time. The processor's cores are shared out among them.
        show: Called now and then with how far the runs are.
        start: Starts one run, given its settings, its directory, its log file and how many threads it may use.
        failed: Called at once with the name of a run that failed, and its exit code (negative: killed by that signal).

    Raises:
        RunsFailed: After all others are done, if runs failed; says which, and why.
    """
    directories = {name: RunDirectory(root / name) for name in runs}
    waiting = [name for name, settings in runs.items() if not directories[name].holds_result_of(settings)]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failures: dict[str, str] = {}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ExitStack() as stack:
        stack.callback(_stop, running)
        # So that the processes do not go on without this one if it is told to end.
        stack.enter_context(handled_by(signal.default_int_handler, signal.SIGTERM))
        while True:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                running[name] = start(runs[name], directories[name], _log(root, name), threads)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                if (code := running.pop(name).returncode) != 0:
                    failures[name] = _last_words(_log(root, name))
                    failed(name, code)
            finished = len(runs) - len(waiting) - len(running) - len(failures)
            shares = {name: len(directories[name].metrics()) / _evaluations(runs[name]) for name in running}
            show(RunsProgress(finished, len(runs), shares))
            if not (waiting or running):
                break
            time.sleep(_POLL)
    if failures:
        listed = "\n  - ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise RunsFailed(f"{len(failures)} of {len(runs)} runs failed, the others are kept:\n  - {listed}")


def _stop(running: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Asks every process to save and stop, and waits for it; none are left when all went well."""
    for process in running.values():
        process.terminate()
    for process in running.values():
        process.wait()


def _log(root: Path, name: str) -> Path:
    return root / ".logs" / f"{name}.log"


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or ["it said nothing"])[-1] + f" (see {log})"


def _evaluations(settings: ResolvedSettings) -> int:
    return -(-settings.epochs // settings.evaluate_every)
