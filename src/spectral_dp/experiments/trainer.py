"""One training run: batches from a method, losses, evaluations, checkpoints, and at the end everything on disk."""

from __future__ import annotations

import math
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.data import random_views
from spectral_dp.errors import SpectralDPError
from spectral_dp.experiments import methods
from spectral_dp.experiments.data_source import load_images, load_records
from spectral_dp.experiments.feature_data import load_features, with_normalization
from spectral_dp.experiments.feature_stages import reads_features
from spectral_dp.experiments.figures import draw_run
from spectral_dp.experiments.fine_tuning import check_fine_tuning, is_fine_tuned, network_data
from spectral_dp.experiments.layer_facts import describe_layers
from spectral_dp.experiments.method import PRETRAINED_ROWS, Batch, TrainingData
from spectral_dp.experiments.model_card import write_model_card
from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.optimizers import settled
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import ResolvedSettings
from spectral_dp.experiments.several_processes import refuse_for_ranks
from spectral_dp.experiments.signals import handled_by
from spectral_dp.experiments.statement import privacy_statement, provenance, write_statement
from spectral_dp.experiments.weight_averages import WeightAverages
from spectral_dp.features import FeatureDataset
from spectral_dp.files import whole_file, write_json
from spectral_dp.training.distributed.ranks import current_ranks, of_first

#: The most of a run that a kill can cost where checkpoints within epochs are possible, in seconds.
CHECKPOINT_EVERY = 300.0

#: Share of the training time that looking at epsilon between evaluations may take.
ACCOUNTING_SHARE = 0.05


class Interrupted(SpectralDPError, RuntimeError):
    """The run was told to stop (Ctrl-C, SIGTERM); it can be resumed."""


@dataclass
class TrainingProgress:
    """Where a run is; handed to whoever shows it, after every logical step."""

    step: int
    steps: int
    epoch: int
    epochs: int
    epsilon: float | None
    accuracy: float | None


def run(
    settings: ResolvedSettings,
    directory: RunDirectory,
    *,
    resume: bool = False,
    show: Callable[[TrainingProgress], None] = lambda _: None,
) -> dict[str, Any]:
    """Trains as the settings say and returns the summary; with ``resume``, goes on where the directory left off.

    Of several processes that train together, the first evaluates and writes the directory; the others return nothing.

    Raises:
        Interrupted: If a signal asked to stop. A checkpoint was written if the method can resume from there.
    """
    is_first = (ranks := current_ranks()) is None or ranks.is_first
    if ranks is not None:
        refuse_for_ranks(settings)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with directory.claimed(settings, resume=resume) if is_first else nullcontext():
        if of_first(ranks, lambda: directory.is_finished, "the beginning of the run"):
            return directory.summary() if is_first else {}
        dataset = load_data(settings)  # only now: features take long, and a directory that is taken is known at once
        with stop_requests() as is_stopped:
            trainer = Trainer(settings, directory, dataset, show, is_stopped)
            if is_first:
                directory.begin(settings)  # only now: settings that were refused must not bind the directory
            return trainer.run()


def load_data(settings: ResolvedSettings) -> TrainingData:
    """Returns the data set of a run."""
    check_fine_tuning(settings)
    if reads_features(settings):
        return load_features(settings)
    records = load_records(settings) if is_fine_tuned(settings) else load_images(settings)
    if settings.validation_size:
        records = records.with_validation(settings.validation_size)
    records = records.subset(settings.train_size, settings.test_size)
    return network_data(settings, records) if is_fine_tuned(settings) else records


class Trainer:
    """The loop of a run and its state."""

    def __init__(
        self,
        settings: ResolvedSettings,
        directory: RunDirectory,
        dataset: TrainingData,
        show: Callable[[TrainingProgress], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        self.settings, self.directory, self.dataset = settings, directory, dataset
        self._show, self._is_stopped, self._ranks = show, is_stopped, current_ranks()
        self._is_first = self._ranks is None or self._ranks.is_first
        self._processes = [1 if self._ranks is None else self._ranks.size]  # of the whole run, in order
        network = build_network(settings, dataset.input_shape, dataset.classes)
        network = with_normalization(settings, network, dataset.input_shape)
        self.method = methods.start(settings, network, dataset)
        self.model = self.method.model
        self.steps = settings.epochs * self.method.steps_per_epoch
        self.step = 0
        self._has_stepped = False  # in this process; only then is the size of every spectrum known
        self._averages = WeightAverages(self.model, settings)
        self._seconds = self._step_seconds = 0.0  # in all, and of training steps alone; with earlier processes
        self._made_by = provenance()  # now: the code may have changed by the end of a long run
        self._augmentation: torch.Generator | None = None
        self._losses: list[float] = []
        self._epsilon = self.method.epsilon()
        self._accuracy: float | None = None
        self._next_accounting = 0.0  # when epsilon may be looked at again
        self._tensorboard: Any = None

    def run(self) -> dict[str, Any]:
        """Trains to the end. The directory has the settings already: without them, a killed run could not go on."""
        self._tensorboard = _tensorboard(self.directory) if self._is_first else None
        self._resume()
        self._started = time.perf_counter()
        while self.method.epoch < self.settings.epochs:
            self._train_epoch()
            if self._is_to_evaluate():
                self._save()  # before the evaluation is recorded: what is known of a step was accounted for
                self._evaluate()
        return self._finish() if self._is_first else {}

    @property
    def seconds(self) -> float:
        """Time spent on the run so far."""
        return self._seconds + time.perf_counter() - self._started

    def _is_to_evaluate(self) -> bool:
        epoch = self.method.epoch
        return epoch % self.settings.evaluate_every == 0 or epoch == self.settings.epochs

    def _train_epoch(self) -> None:
        self.model.train()
        began = time.perf_counter()
        if self.method.release_at_once():
            self.step += 1
            self._step_seconds += time.perf_counter() - began
            return
        for batch in self.method.batches():
            self._set_learning_rate()
            images, labels = self._prepared(batch)
            self.method.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(images), labels)
            loss.backward()
            self.method.optimizer.step()
            if batch.is_rehearsal:
                self._augmentation = None  # every rehearsal, and the step itself, draws the same
                continue
            if self.settings.unsafe_diagnostics and len(labels):
                self._losses.append(loss.item())
            if not batch.is_last:
                continue
            self.step += 1
            self._has_stepped = True
            self._augmentation = None
            self._averages.update()
            self._step_seconds += time.perf_counter() - began
            if (asked := time.perf_counter()) >= self._next_accounting:
                self._epsilon = self.method.epsilon()
                now = time.perf_counter()
                self._next_accounting = now + (now - asked) / ACCOUNTING_SHARE
            self._show(self._progress())
            if self.method.resumes_within_epochs and time.perf_counter() - self._saved >= CHECKPOINT_EVERY:
                self._save()
            if self._must_stop():
                self._stop()
            began = time.perf_counter()

    def _prepared(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Augments and normalises; views of a sample lie next to each other."""
        images, labels = batch.images, batch.labels
        settings, multiplicity = self.settings, self.settings.augmentation_multiplicity
        if multiplicity > 1 or settings.flip or settings.shift:
            if self._augmentation is None:  # one for a logical step, whatever parts it comes in
                rank = self._ranks.rank if self._ranks is not None else 0  # others draw for other samples
                self._augmentation = torch.Generator().manual_seed(settings.seed * 1_000_003 + self.step + (rank << 52))
            if isinstance(self.dataset, FeatureDataset):
                images = self.dataset.augmented(images, multiplicity, self._augmentation)
            else:
                images = random_views(
                    images, multiplicity, flip=settings.flip, shift=settings.shift, generator=self._augmentation
                )
            labels = labels.repeat_interleave(multiplicity)
        images = in_quick_layout(self.model, self.dataset.normalise(images.to(settings.device)))
        return images, labels.to(settings.device)

    def _set_learning_rate(self) -> None:
        """The schedule depends on the step alone, so there is no state of it to save."""
        progress = self.step / self.steps
        factor = {
            "constant": 1.0,
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
        }[self.settings.schedule]
        for group in self.method.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * factor * group.get("rate", 1.0)

    def _evaluate(self) -> None:
        if not self._is_first:
            return
        self._write_layers()
        self._epsilon = self.method.epsilon()
        rows = PRETRAINED_ROWS if is_fine_tuned(self.settings) else 1000
        with settled(self.method.optimizer):
            loss, self._accuracy = evaluate(self._averages.result, self.dataset, self.settings.device, rows)
            compared = {
                str(decay): evaluate(model, self.dataset, self.settings.device, rows)[1]
                for decay, model in self._averages.candidates()
            }
        row: dict[str, Any] = {
            "epoch": self.method.epoch,
            "step": self.step,
            "epsilon": self._epsilon if self._epsilon is not None and math.isfinite(self._epsilon) else None,
            "ledger_head": ledger.head if (ledger := self.method.ledger) else None,
            "heldout_accuracy": self._accuracy,
            "heldout_loss": loss if math.isfinite(loss) else None,
            "learning_rate": self.method.learning_rate,
            "seconds": round(self.seconds, 3),
        }
        if compared:
            row["accuracy_by_ema_decay"] = compared
        if self.settings.unsafe_diagnostics:
            row["unsafe"] = self._unsafe()
        self.directory.add_metrics(row)
        if self._tensorboard is not None:
            for name in ("heldout_accuracy", "heldout_loss", "epsilon"):
                if row[name] is not None:
                    self._tensorboard.add_scalar(name, row[name], self.step)
        self._show(self._progress())

    def _write_layers(self) -> None:
        if self._has_stepped:
            write_json(self.directory.layers, describe_layers(self.method))
        elif not self.directory.layers.exists():  # killed before it was written; what is not known yet is left out
            write_json(self.directory.layers, [])

    def _unsafe(self) -> dict[str, float]:
        found = {"training_loss": sum(self._losses) / len(self._losses)} if self._losses else {}
        self._losses = []
        return found | (self.method.diagnostics.take() if self.method.diagnostics is not None else {})

    def _save(self) -> None:
        extra: dict[str, Any] = {"step": self.step, "seconds": self.seconds, "step_seconds": self._step_seconds}
        extra |= {"processes": self._processes, "averages": self._averages.state_dict()}
        self.method.save(self.directory.checkpoint, extra)
        self._saved = time.perf_counter()

    def _resume(self) -> None:
        self._started = self._saved = time.perf_counter()
        if not of_first(self._ranks, self.directory.checkpoint.exists, "the search for a checkpoint"):
            self._checked_metrics(None)
            return
        extra = self.method.load(self.directory.checkpoint)
        self.step = int(extra["step"])
        self._seconds, self._step_seconds = float(extra["seconds"]), float(extra["step_seconds"])
        before = extra.get("processes", [])  # no list in checkpoints of earlier versions
        self._processes = before if before[-1:] == self._processes else [*before, *self._processes]
        averages = extra.get("averages") or {str(self.settings.ema_decay): extra.get("average")}  # earlier versions
        self._averages.load_state_dict(averages)
        rows = self._checked_metrics(self.step)
        self._accuracy = rows[-1]["heldout_accuracy"] if rows else None
        self._epsilon = self.method.epsilon()
        between_epochs = self.step == self.method.epoch * self.method.steps_per_epoch > 0
        if between_epochs and self._is_to_evaluate() and (not rows or rows[-1]["step"] < self.step):
            self._evaluate()  # it was killed between the two

    def _checked_metrics(self, checkpoint_step: int | None) -> list[dict[str, Any]]:
        if not self._is_first:
            return []
        return self.directory.checked_metrics(checkpoint_step, None if checkpoint_step is None else self.method.ledger)

    def _must_stop(self) -> bool:
        """Returns whether this process was told to stop, or another of those that train together."""
        stopped = self._is_stopped()
        return stopped if self._ranks is None else self._ranks.meet("the end of a step", flag=stopped).flag

    def _stop(self) -> None:
        if self.method.resumes_within_epochs:
            self._save()
        kept = "" if self.method.resumes_within_epochs else " (it goes on from its last evaluation)"
        raise Interrupted(f"stopped at step {self.step} of {self.steps}{kept}")

    def _finish(self) -> dict[str, Any]:
        statement = privacy_statement(self.settings, self.method, self._made_by, self._processes)
        write_statement(statement, self.directory.path)
        result = self._averages.result
        own = getattr(result, "_module", result)  # its names are those of the user's model, not of Opacus' wrapper
        with settled(self.method.optimizer):
            weights = {name: value.cpu().clone() for name, value in own.state_dict().items()}  # ties undone
        with whole_file(self.directory.weights) as file:
            file.write(safetensors_bytes(weights))
        rows = self.directory.metrics()
        summary = {
            **{name: getattr(self.settings, name) for name in ("dataset", "model", "method", "seed", "epochs")},
            **{name: statement.get(name) for name in ("epsilon", "noise_multiplier", "sample_rate")},
            **{name: statement[name] for name in ("private", "warnings", "made_by")},
            "heldout_accuracy": rows[-1]["heldout_accuracy"],
            "best_heldout_accuracy": max(row["heldout_accuracy"] for row in rows),
            "accuracy_by_ema_decay": rows[-1].get("accuracy_by_ema_decay", {}),
            "delta": self.settings.delta if self.settings.is_private else None,
            "steps": self.step,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "seconds": round(self.seconds, 3),
            "step_seconds": round(self._step_seconds, 3),
            "peak_memory_mb": round(_peak_memory_mb(), 1),
        }
        draw_run(self.directory)
        if self._tensorboard is not None:
            self._tensorboard.close()
        write_model_card(self.settings, statement, summary, self.directory.path)
        write_json(self.directory.summary_file, summary)
        return summary

    def _progress(self) -> TrainingProgress:
        return TrainingProgress(
            self.step, self.steps, self.method.epoch, self.settings.epochs, self._epsilon, self._accuracy
        )


def in_quick_layout(model: nn.Module, images: Tensor) -> Tensor:
    """Returns the same images with channels last in memory, if the model convolves them on a CPU.

    Kernels for CPUs work in that order. They rearrange whatever comes in another one, before and after each layer; what
    comes in theirs they leave in theirs, so that the whole network has it. Model2 and Model3 train a quarter faster.
    """
    if images.dim() != 4 or images.device.type != "cpu" or not any(isinstance(m, nn.Conv2d) for m in model.modules()):
        return images
    return images.contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def evaluate(model: nn.Module, dataset: TrainingData, device: str, rows: int = 1000) -> tuple[float, float]:
    """Returns loss and accuracy on the held-out samples, of which so many go through the model at once."""
    was_training = model.training
    model.eval()
    loss = correct = 0.0
    for images, labels in zip(dataset.test_images.split(rows), dataset.test_labels.split(rows), strict=True):
        images = in_quick_layout(model, dataset.normalise(images.to(device)))
        scores, labels = model(images), labels.to(device)
        loss += F.cross_entropy(scores, labels, reduction="sum").item()
        correct += (scores.argmax(1) == labels).sum().item()
    model.train(was_training)
    return loss / len(dataset.test_labels), correct / len(dataset.test_labels)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Notices Ctrl-C and SIGTERM without breaking a step; a second Ctrl-C stops at once."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with handled_by(ask, signal.SIGINT, signal.SIGTERM):
        yield asked.is_set


def _peak_memory_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _tensorboard(directory: RunDirectory) -> Any:
    """Returns a TensorBoard writer if TensorBoard is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory.path / "tensorboard"))
