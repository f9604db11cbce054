"""The directory of a training run: what lies in it, and who may write to it.

config.json           resolved settings; ``spectral-dp train --config`` takes it
metrics.jsonl         one line an evaluation
checkpoint.pt         everything needed to go on
layers.json           what is released of each layer, and the noise on it
weights.safetensors   the final weights
privacy.json, .md     the privacy statement
MODEL_CARD.md         what the model is and promises, with questions for its owner
summary.json          the result; its presence says that the run is finished
accuracy.png, ...     plots
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from spectral_dp.accounting import Ledger
from spectral_dp.errors import SpectralDPError
from spectral_dp.experiments.setting_files import read_file
from spectral_dp.experiments.settings import ResolvedSettings
from spectral_dp.files import locked, partial_directory, remove_abandoned, write_json, write_text


class RunDirectoryError(SpectralDPError, ValueError):
    """A run directory that cannot be used, with the reason."""


class RunDirectory:
    """Paths of a run, and its files read and written whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"
        self.layers = self.path / "layers.json"
        self.weights = self.path / "weights.safetensors"
        self.privacy = self.path / "privacy.json"
        self.summary_file = self.path / "summary.json"

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.config.exists()

    @property
    def is_finished(self) -> bool:
        """Whether a run was finished here."""
        return self.summary_file.exists()

    @contextmanager
    def claimed(self, settings: ResolvedSettings, *, resume: bool) -> Iterator[None]:
        """Lets a run begin or go on here, alone; nothing is written if the directory holds something else."""
        if self.path.is_dir():
            remove_abandoned(self.config)  # of a process that was killed while it began here
        if self.exists:
            self._check_resumable(settings, resume)
        elif self.path.exists() and (not self.path.is_dir() or {p.name for p in self.path.iterdir()} - {".lock"}):
            raise RunDirectoryError(f"{self.path} exists and is no run of spectral-dp: choose another directory")
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                is_ours = stack.enter_context(locked(self.path / ".lock"))
            except OSError as error:
                raise RunDirectoryError(f"cannot write to {self.path}: {error.strerror}") from error
            if not is_ours:
                raise RunDirectoryError(f"another process is training in {self.path}: wait for it")
            yield

    def begin(self, settings: ResolvedSettings) -> None:
        """Writes down the settings, once they are known to work; a directory that is resumed has them."""
        if not self.exists:
            write_json(self.config, settings.to_dict())

    def settings(self) -> ResolvedSettings:
        """Returns the settings of the run."""
        if not self.exists:
            raise RunDirectoryError(f"{self.path} holds no run: it has no config.json")
        return ResolvedSettings.from_dict(read_file(self.config), source=str(self.config))

    def holds_result_of(self, settings: ResolvedSettings) -> bool:
        """Whether a run with these settings was finished here; where and how fast it was computed does not matter."""
        return self.exists and self.is_finished and self.settings().essential() == settings.essential()

    def copy_record(self, to: Path) -> None:
        """Copies what a report reads of a finished run, a few kilobytes.

        A copy of another run is replaced whole. One that is there already is not touched, so that no kill can lose it.
        """
        files = (self.config, self.metrics_file, self.layers, self.privacy, self.summary_file)
        record = {file.name: file.read_bytes() for file in files if file.exists()}
        if to.is_dir() and {file.name: file.read_bytes() for file in to.iterdir() if file.is_file()} == record:
            return
        to.parent.mkdir(parents=True, exist_ok=True)
        with partial_directory(to) as partial:
            (partial / "new").mkdir()
            for name, content in record.items():
                (partial / "new" / name).write_bytes(content)
            if to.exists():
                to.rename(partial / "old")
            (partial / "new").rename(to)

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the evaluations so far; a line that was cut off by a kill is left out."""
        if not self.metrics_file.exists():
            return []
        try:
            lines = self.metrics_file.read_text().split("\n")
            rows = [json.loads(line) for line in lines[:-1]]  # the last piece is empty, or an incomplete line
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunDirectoryError(f"{self.metrics_file} is damaged: {error}") from error
        if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            raise RunDirectoryError(f"{self.metrics_file} is damaged: it has a line that is no evaluation")
        return rows

    def checked_metrics(self, checkpoint_step: int | None, ledger: Ledger | None) -> list[dict[str, Any]]:
        """Returns the evaluations so far, without a line that was cut off, if the checkpoint accounts for them.

        Checkpoints are written before anything is told of a step. So if more is known than the checkpoint says, it was
        lost or replaced, and going on from it would forget what was released. Every evaluation of a private run names
        the head that the ledger had then, so a checkpoint of the same settings from another run is noticed too.

        Args:
            checkpoint_step: The step of the checkpoint; None if there is none.
            ledger: The ledger of the checkpoint; None if the run is not private.
        """
        rows = self.metrics()
        if rows:
            last = max(rows, key=lambda row: row["step"])  # its head vouches for all before it
            self._check_accounted(last, checkpoint_step, ledger)
        write_text(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def _check_accounted(self, row: dict[str, Any], checkpoint_step: int | None, ledger: Ledger | None) -> None:
        known = row["step"]
        if checkpoint_step is None:
            fault = "its checkpoint is gone"
        elif known > checkpoint_step:
            fault = f"its checkpoint is of step {checkpoint_step}"
        elif ledger is not None and row.get("ledger_head") != ledger.head_after(
            known + ledger.steps - checkpoint_step  # the ledger also lists what was released before the first step
        ):
            fault = f"its checkpoint is of another run, {ledger.identity[:8]}, or of another continuation of this one"
        else:
            return
        raise RunDirectoryError(
            f"{self.path} has evaluations up to step {known}, but {fault}: going on would forget what these steps "
            "released. Put the last checkpoint back, or begin a new run in another directory"
        )

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Appends an evaluation."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def read(self, path: Path) -> Any:
        """Returns the contents of one of the JSON files."""
        try:
            return json.loads(path.read_text())
        except FileNotFoundError as error:
            raise RunDirectoryError(f"{self.path} has no {path.name}: is the run finished?") from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunDirectoryError(f"{path} is damaged: {error}") from error

    def summary(self) -> dict[str, Any]:
        """Returns the result of a finished run."""
        result = self.read(self.summary_file)
        if not isinstance(result, dict):
            raise RunDirectoryError(f"{self.summary_file} is damaged: it holds a {type(result).__name__}")
        return result

    def _check_resumable(self, settings: ResolvedSettings, resume: bool) -> None:
        saved, asked = self.settings().essential(), settings.essential()
        differences = [
            f"{name}: {saved[name]!r} there, {asked[name]!r} now" for name in asked if saved[name] != asked[name]
        ]
        if differences:
            listed = "\n  - ".join(differences)
            raise RunDirectoryError(f"{self.path} holds a run with other settings:\n  - {listed}\nChoose another --out")
        if not resume:
            state = "a finished" if self.is_finished else "an unfinished"
            raise RunDirectoryError(f"{self.path} holds {state} run with these settings: add --resume to go on with it")
