"""The accounted search: trials whose number is random, of which the best is released with an epsilon for the choice.

Formal guarantee of :func:`run_search`. What is in the directory ``released`` is ``(epsilon, δ)``-DP:

* What is bounded: the winner's settings, seed, weights and noisy score, released together, by the guarantee of
  ``spectral_dp.accounting.selection``.
* For which neighbours: data sets that differ by adding or removing one record, whether it is a training record or a
  held-out one. A record is one or the other, so it takes part in the training steps *or* in the scores.
* Under which assumptions:

  - Those of ``docs/privacy.md`` for every trial, whose noise and batches come from the operating system.
  - Which place in the data set a record has, and so whether it is held out, does not depend on any record; nor does
    the number of places. (Neighbours differ by what is at one place.)
  - Nobody outside sees what is in the directory ``private``, or how long the search took.
  - Whether a trial fails, or is interrupted, does not depend on the records.
  - Nobody begins a second search because of how the first one went. Each one costs its own epsilon.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from spectral_dp.accounting import Ledger
from spectral_dp.experiments.processes import RunsFailed, RunsProgress, run_all
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.tuning.draw import DrawFile, SearchError
from spectral_dp.experiments.tuning.plan import AccountedSearch
from spectral_dp.experiments.tuning.release import Winner, publish
from spectral_dp.experiments.tuning.score import noisy_accuracy
from spectral_dp.files import locked, write_json, write_text
from spectral_dp.relations import Relation
from spectral_dp.training import checkpoint

_SIGNALS = 128  # exit codes above are those of signals, as shells and launchers tell of them; Python's are negative
_NOTICE = """\
NOT RELEASED. What is in this directory is not covered by the epsilon of the search: how many trials there were, their
scores, accuracies, weights and logs. Do not publish it, and do not choose by it. Keep it until the search is finished;
then it can be deleted.
"""


def run_search(
    search: AccountedSearch,
    out: Path,
    *,
    jobs: int = 1,
    run: Callable[..., None] = run_all,
) -> dict[str, Any]:
    """Runs the trials of a search that are not finished, publishes the winner, and returns its privacy statement.

    Args:
        search: The plan of the search.
        out: The directory of the search. One that was begun there before goes on.
        jobs: How many trials to run at a time.
        run: Runs the trials, as :func:`~spectral_dp.experiments.processes.run_all` does.

    Raises:
        SearchError: If the directory holds another search, or if this one was interrupted.
    """
    _write_plan(search, out)
    with locked(out / ".lock") as is_ours:
        if not is_ours:
            raise SearchError(f"another process works on the search in {out}: wait for it")
        return _Trials(search, out / "private").best(out / "released", jobs, run)


class _Trials:
    """The trials of a search and their outcomes, in the directory that is not released."""

    def __init__(self, search: AccountedSearch, root: Path) -> None:
        self._search, self._runs, self._outcomes = search, root / "trials", root / "outcomes"
        is_new = not root.exists()
        for directory in (root, self._runs, self._outcomes):
            directory.mkdir(mode=0o700, exist_ok=True)
        write_text(root / "NOT-RELEASED.txt", _NOTICE)
        decided = root / "draw.json"
        if not is_new and not decided.exists() and any(self._runs.iterdir()):
            raise SearchError(f"{decided} is gone, which says how many trials there are: this search cannot go on")
        drawn = DrawFile(decided, search.to_dict()).trials(search.selection.law, len(search.candidates))
        self.settings = {
            f"trial-{i:03}": replace(search.candidates[trial.candidate], seed=trial.seed)
            for i, trial in enumerate(drawn)
        }

    def best(self, released: Path, jobs: int, run: Callable[..., None]) -> dict[str, Any]:
        """Runs what is not finished, and publishes the winner."""
        pending = {name: settings for name, settings in self.settings.items() if not self._outcome(name).exists()}
        self._require_begun_runs(pending)
        if any(self._is_running(name) for name in pending):
            raise SearchError("a trial of this search still runs, although its search was killed: wait for its end")

        def watch(progress: RunsProgress) -> None:
            for name in progress.running:
                if self._run(name).exists:
                    self._begun(name).touch()

        with suppress(RunsFailed):  # noted already: a trial that failed counts as the worst, and is not run again
            run(pending, self._runs, jobs=jobs, show=watch, failed=self._note_failure)
        for name, settings in pending.items():
            if not self._outcome(name).exists() and self._run(name).holds_result_of(settings):
                self._score(name)
        if any(not self._outcome(name).exists() for name in self.settings):
            raise SearchError("the search was interrupted: the same command goes on with it")
        return publish(self._search, self._winner(), released)

    def _winner(self) -> Winner | None:
        """Returns the trial with the best score, or None if there is none. The order depends on released values."""
        scored = []
        for name, settings in self.settings.items():
            outcome = json.loads(self._outcome(name).read_text())
            if outcome["score"] is not None:
                if not self._run(name).holds_result_of(settings):
                    raise SearchError(f"{self._run(name).path} holds another run than the one that was drawn")
                scored.append(Winner(settings, float(outcome["score"]), self._run(name)))
        return max(scored, key=lambda winner: (winner.score, winner.settings.seed), default=None)

    def _score(self, name: str) -> None:
        """Draws the score of a finished trial, once, if the trial spent no more than was planned."""
        run = self._run(name)
        spent = Ledger.from_state_dict(checkpoint.load(run.checkpoint)["ledger"])
        if spent.relation is not Relation.ADD_OR_REMOVE_ONE or not self._search.selection.covers(spent.phases):
            raise SearchError(f"{run.path} spent more than the search accounts for, so nothing can be released")
        if self._search.protects and not run.read(run.privacy)["private"]:
            raise SearchError(
                f"{run.path} says that it is not private, so nothing can be released: see privacy.md there"
            )
        correct = round(run.summary()["heldout_accuracy"] * self._search.held_out)
        score = noisy_accuracy(correct, self._search.held_out, self._search.score_noise)
        write_json(self._outcome(name), {"score": score})

    def _note_failure(self, name: str, code: int) -> None:
        # One that was killed or told to stop goes on where it was; one that another process runs has not failed.
        if 0 < code <= _SIGNALS and not self._is_running(name):
            write_json(self._outcome(name), {"score": None, "exit_code": code})

    def _require_begun_runs(self, pending: Mapping[str, Any]) -> None:
        if gone := [name for name in pending if self._begun(name).exists() and not self._run(name).exists]:
            raise SearchError(
                f"{', '.join(gone)} was begun, and is gone: it would be run again, with other luck. Put it back, or "
                "begin a new search in another directory, which costs its epsilon in addition"
            )

    def _is_running(self, name: str) -> bool:
        """Returns whether a process holds the lock of a trial's run directory."""
        lock = self._run(name).path / ".lock"
        if not lock.exists():
            return False
        with locked(lock) as is_free:
            return not is_free

    def _run(self, name: str) -> RunDirectory:
        return RunDirectory(self._runs / name)

    def _outcome(self, name: str) -> Path:
        return self._outcomes / f"{name}.json"

    def _begun(self, name: str) -> Path:
        return self._outcomes / f"{name}.begun"


def _write_plan(search: AccountedSearch, out: Path) -> None:
    path, plan = out / "search.json", search.to_dict()
    if path.exists():
        if json.loads(path.read_text()) != json.loads(json.dumps(plan)):
            raise SearchError(f"{out} holds another search than this one: choose another directory")
    elif out.exists() and any(out.iterdir()):
        raise SearchError(f"{out} exists and holds no search: choose another directory")
    else:
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, plan)
