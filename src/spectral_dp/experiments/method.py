"""The interface of all methods: optimizer, sampling and accounting of a run, and its checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from spectral_dp.accounting import Ledger
from spectral_dp.data import ImageDataset, TextDataset
from spectral_dp.experiments.diagnostics import Watched
from spectral_dp.features import FeatureDataset
from spectral_dp.training import checkpoint

#: What a run trains on.
TrainingData = ImageDataset | FeatureDataset | TextDataset

#: Samples that go through a pretrained network at once where nothing is said: its maps of one image take megabytes.
PRETRAINED_ROWS = 64


class Batch(NamedTuple):
    """A physical batch; the last of its logical step is the one after which the model has moved.

    Images may be features, of several views each ``(B, V, ...)``. A rehearsal (see ``spectral_dp.training.rehearsal``)
    is no part of any step.
    """

    images: Tensor
    labels: Tensor
    is_last: bool
    is_rehearsal: bool = False


class Method(ABC):
    """Optimizer, sampling and accounting of a run. Its checkpoints are taken between epochs, unless it says more."""

    #: Whether a checkpoint in the middle of an epoch can be resumed there.
    resumes_within_epochs = False

    model: nn.Module
    optimizer: Any = None  # a method that makes its model in one release has none
    steps_per_epoch: int
    epoch: int = 0  # the epoch that the next call of batches() goes on with
    diagnostics: Watched | None = None  # figures of the raw private data, if they were asked for

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Yields the batches that are left of the current epoch."""

    def release_at_once(self) -> bool:
        """Makes the model in one release, and returns whether it did; a method that takes steps does nothing here."""
        return False

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the next step; None if there is none."""
        group = self.optimizer and self.optimizer.param_groups[0]
        return group and group["lr"] / (group.get("rate") or 1.0)  # without the factor of its layers

    @property
    def ledger(self) -> Ledger | None:
        """The steps made so far; None if nothing is guaranteed."""
        return None

    def epsilon(self) -> float | None:
        """Returns what has been spent so far; None if nothing is guaranteed."""
        return None

    def facts(self) -> dict[str, Any]:
        """Returns what the privacy statement says of noise and sampling; nothing if nothing is guaranteed."""
        return {}

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds beside model, optimizer and epoch."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most have nothing to restore
        """Restores :meth:`state`."""

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint, with whatever else the trainer keeps."""
        checkpoint.save(
            {
                "module": self.model.state_dict(),
                "optimizer": self.optimizer and self.optimizer.state_dict(),
                "epoch": self.epoch,
                "state": self.state(),
                "extra": dict(extra),
            },
            path,
        )

    def load(self, path: Path) -> dict[str, Any]:
        """Restores a checkpoint; returns what else was kept."""
        saved = checkpoint.load(path)
        try:
            self.model.load_state_dict(saved["module"])
            if self.optimizer is not None:
                self.optimizer.load_state_dict(saved["optimizer"])
            self.load_state(saved["state"])
            self.epoch = int(saved["epoch"])
            return dict(saved["extra"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise checkpoint.CheckpointError(f"{path} is not a checkpoint of this run: {error}") from error
