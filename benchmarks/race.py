"""Contestants against each other: each in a process of its own, all alive at once, one of them working at a time.

Rounds visit them forwards and backwards in turn (A B C, C B A, ...), which cancels drift. All make the same number of
steps a round, except those so slow that one is enough.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workloads import Workload

CLOCKS = ("wall", "cpu")
_WORKER = Path(__file__).with_name("worker.py")
_ROUND = 0.25  # seconds of plain steps in a round
_MUCH_SLOWER = 10  # times plain: one step a round is enough


@dataclass
class Measured:
    """The steps of one contestant on one workload.

    Attributes:
        contestant: Its name.
        seconds: A step's time in every round, None in those it did not take part in.
        memory_mb: The peak of its process, above what that had before the model was built.
        steps_a_round: How many steps each of ``seconds`` is the mean of.
        failure: Why there is nothing, or no more, to report.
    """

    contestant: str
    seconds: list[float | None] = field(default_factory=list)
    memory_mb: float | None = None
    steps_a_round: int = 0
    failure: str | None = None

    @property
    def times(self) -> list[float]:
        return [t for t in self.seconds if t is not None]


@dataclass(frozen=True)
class Terms:
    """How a race is run.

    Attributes:
        rounds: How many.
        threads: Of torch in every process; 0 leaves the choice to torch.
        patience: Seconds that a first step may take; who takes longer runs in fewer rounds.
        most_mb: Memory for each process; what is free where None.
        clock: ``"wall"``, or ``"cpu"`` for the time that all threads of a process were at work.
    """

    rounds: int
    threads: int = 0
    patience: float = 30.0
    most_mb: float | None = None
    clock: str = "wall"


def race(
    work: Workload, names: Iterable[str], terms: Terms, note: Callable[[str], None] = lambda _: None
) -> list[Measured]:
    """Measures the contestants of these names; ``note`` hears what is going on."""
    runners = [_Runner(name, work, terms) for name in names]
    try:
        note("loading libraries")
        for runner in runners:
            runner.wait_until_warm()
        for runner in runners:
            note(f"first step, {runner.result.contestant}")
            runner.begin()
        _settle_steps(runners, terms)
        for i in range(terms.rounds):
            for runner in runners if i % 2 == 0 else reversed(runners):
                note(f"round {i + 1} of {terms.rounds}, {runner.result.contestant}")
                runner.run(i, terms)
    finally:
        for runner in runners:
            runner.stop()
    return [runner.result for runner in runners]


def _settle_steps(runners: list[_Runner], terms: Terms) -> None:
    """Sets how many steps each makes a round, by a second step, which is quicker than the first."""
    typical = {runner: runner.second_step(terms) for runner in runners}
    reference = next((t for t in typical.values() if t is not None), None)  # plain, which is the first
    for runner, seconds in typical.items():
        if reference is not None and seconds is not None:
            slow = seconds > _MUCH_SLOWER * reference
            runner.result.steps_a_round = 1 if slow else max(1, round(_ROUND / reference))


class _Runner:
    """A process that makes steps when told to."""

    def __init__(self, name: str, work: Workload, terms: Terms) -> None:
        self.result = Measured(name)
        how = {"threads": terms.threads, "most_mb": terms.most_mb, "clock": terms.clock}
        spec = {"contestant": name, "workload": asdict(work), **how}
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads would fill up and block
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )
        self._first_step: float | None = None

    def wait_until_warm(self) -> None:
        self._answer()

    def begin(self) -> None:
        """Builds its model and makes a first step."""
        self._first_step = self._ask("begin")

    def second_step(self, terms: Terms) -> float | None:
        if self._first_step is None or self._first_step > terms.patience:
            return self._first_step
        return self._ask("1")

    def run(self, i: int, terms: Terms) -> None:
        """Takes part in round ``i``, unless it is too slow to take part in all."""
        takes_part = self.result.failure is None and i in self._rounds(terms)
        self.result.seconds.append(self._ask(str(self.result.steps_a_round)) if takes_part else None)

    def _rounds(self, terms: Terms) -> set[int]:
        assert self._first_step is not None
        share = min(1.0, terms.patience / self._first_step)
        count = max(1, int(terms.rounds * share))
        return {k * terms.rounds // count for k in range(count)}

    def _ask(self, request: str) -> float | None:
        if self.result.failure is not None:
            return None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died while it waited: there is no answer, and the cause is looked for
            print(request, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> float | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        facts: dict[str, Any] = json.loads(line) if line else {"failure": self._cause_of_death()}
        self.result.failure = facts.get("failure")
        self.result.memory_mb = facts.get("memory_mb", self.result.memory_mb)
        return facts.get("seconds")

    def _cause_of_death(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read().strip()
        # Killed by the system, which is its last resort; or an error thrown where nothing could catch it.
        if code == -signal.SIGKILL or "bad_alloc" in said:
            return "out of memory"
        return said.splitlines()[-1] if said else f"ended with code {code}"

    def stop(self) -> None:
        self._process.communicate()
        self._said.close()
