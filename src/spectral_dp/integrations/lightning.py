"""``DifferentialPrivacy``: a callback of Lightning that makes ``Trainer.fit`` train privately.

    privacy = DifferentialPrivacy(target_epsilon=3.0, target_delta=1e-5, max_grad_norm=1.0)
    trainer = lightning.Trainer(max_epochs=10, callbacks=[privacy])
    trainer.fit(module, DataLoader(dataset, batch_size=256))

The module, its ``training_step`` and its optimizer stay as they are. When ``fit`` sets the data up, the callback puts
the private loader and the private optimizer in the places of those it finds, through the strategy of the trainer; when
``fit`` is over, everything is put back. ``docs/integrations.md`` says what is supported.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from spectral_dp.integrations.logical_steps import LogicalSteps, make_private, refuse_problems
from spectral_dp.integrations.missing import stand_in
from spectral_dp.mechanism.clipping import Clipping, ClippingName
from spectral_dp.training.checkpoint import CheckpointError
from spectral_dp.training.config import SpectralConfig
from spectral_dp.training.engine import PrivacyEngine
from spectral_dp.training.optimizer import LossReduction
from spectral_dp.training.sampling import PoissonLoader

try:
    from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    Callback = stand_in("lightning", error)

CHECKPOINT = "spectral_dp"  # the name under which a checkpoint of Lightning holds that of the engine


class DifferentialPrivacy(Callback):  # type: ignore[misc]
    """Makes ``Trainer.fit`` train with differential privacy, with automatic optimization, in one process or several.

    Formal guarantee. The weights after every step, and with them all checkpoints, are released under
    ``(engine.get_epsilon(δ), δ)``-differential privacy with respect to the records of the training data loader, as
    ``PrivacyEngine`` states it. Not covered: what is computed from validation data, and what other callbacks, or hooks
    of the module, print or keep of the training batches they see.

    Every batch that Lightning counts is one logical step: a Poisson batch, of which ``training_step`` is called for as
    many physical batches as memory allows. ``batch_size`` of the data loader is the expected size of the whole.

    What the module logs with ``self.log`` while it trains is a function of the raw data that no budget covers. It is
    left out, with a warning, unless ``unsafe_diagnostics`` is set. What it logs in validation stays.

    Args:
        target_delta: The ``δ`` at which epsilon is planned and reported.
        max_grad_norm: The bound that the gradient of every sample is clipped to; a list with ``clipping="per_layer"``.
        target_epsilon: The ``ε`` to spend over all epochs (or ``max_steps``) of the trainer, which stops there. Give
            this or a noise multiplier.
        noise_multiplier: ``σ``.
        max_physical_batch_size: The most samples to hold in memory at once.
        clipping: ``"flat"``, ``"per_layer"``, ``"automatic"``, or a ``Clipping`` of one's own.
        noise_allocation: For ``"per_layer"``: uniform noise, or the least in total.
        spectral: What is released of each layer; nothing is filtered by default.
        loss_reduction: Whether the loss is the mean or the sum over the records of a batch.
        rehearsal: See ``PrivacyEngine.make_private``.
        engine: Keeps the ledger; a new one by default.
        unsafe_diagnostics: Let the module log figures of the raw data.
    """

    def __init__(
        self,
        *,
        target_delta: float,
        max_grad_norm: float | Sequence[float],
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        max_physical_batch_size: int | None = None,
        clipping: ClippingName | Clipping = "flat",
        noise_allocation: Literal["uniform", "optimal"] = "uniform",
        spectral: SpectralConfig | None = None,
        loss_reduction: LossReduction = "mean",
        rehearsal: bool = True,
        engine: PrivacyEngine | None = None,
        unsafe_diagnostics: bool = False,
    ) -> None:
        self.target_epsilon, self.target_delta, self.noise_multiplier = target_epsilon, target_delta, noise_multiplier
        self.engine = engine if engine is not None else PrivacyEngine()
        self.unsafe_diagnostics = unsafe_diagnostics
        self._options = {
            "max_grad_norm": max_grad_norm,
            "max_physical_batch_size": max_physical_batch_size,
            "clipping": clipping,
            "noise_allocation": noise_allocation,
            "spectral": spectral,
            "loss_reduction": loss_reduction,
            "rehearsal": rehearsal,
        }
        self._steps: LogicalSteps | None = None
        self._saved: Mapping[str, Any] | None = None
        self._is_rehearsing = False
        self._evaluation = ExitStack()
        self._patches = ExitStack()

    @property
    def epsilon(self) -> float:
        """The ``ε`` spent so far at ``target_delta``."""
        return self.engine.accountant.get_epsilon(self.target_delta)

    # From the beginning of fit to its end.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses tuners, and keeps the model of several processes as it is.

        Tuners begin before :meth:`on_fit_start`, and train without this callback, on the raw data. A wrapper of the
        model for several processes would average gradients that carry no noise.
        """
        tuners = [type(c).__name__ for c in trainer.callbacks if isinstance(c, LearningRateFinder | BatchSizeFinder)]
        if stage == "fit" and tuners:
            raise ValueError(
                f"{tuners[0]} (or the Tuner that made it) takes all callbacks out of the Trainer and trains on the raw "
                "data without privacy: what it finds, and the losses it shows, no budget covers. Tune on public data "
                "with a Trainer that does not have this callback. max_physical_batch_size only affects memory, and can "
                "be tried out"
            )
        if stage == "fit" and isinstance(trainer.strategy, DDPStrategy):
            self._patch(trainer.strategy, "configure_ddp", lambda: None)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks the trainer, and lets the data be set up privately."""
        _refuse(trainer, pl_module)
        if trainer.ckpt_path is not None and self._saved is None:
            raise CheckpointError(
                f"{trainer.ckpt_path} does not say what its training has spent: it was saved without this callback, or "
                "with save_weights_only. To begin a new private training with its weights, load them with "
                "load_from_checkpoint, and call fit without ckpt_path"
            )
        strategy = trainer.strategy
        process = strategy.process_dataloader

        def process_dataloader(loader: Any) -> Any:
            loader = process(loader)
            return self._make_private(trainer, pl_module, loader) if trainer.training else loader

        self._steps = None
        self._patch(strategy, "process_dataloader", process_dataloader)
        self._patch(pl_module, "training_step", self._private_training_step(trainer, pl_module))
        self._patch(pl_module, "log", self._private_log(trainer, pl_module))

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)
        self._patches.callback(owner.__dict__.pop, name, None)

    def _make_private(self, trainer: Any, pl_module: Any, loader: Any) -> LogicalSteps:
        if self._steps is not None:
            raise ValueError("private training draws from one data set: give fit a single training DataLoader")
        if not isinstance(loader, DataLoader):
            raise TypeError(f"private training needs a torch DataLoader, got {type(loader).__name__}")
        loader = _of_all_processes(loader)
        (original,) = trainer.optimizers
        optimizer, private = make_private(
            self.engine,
            module=pl_module,
            optimizer=original,
            data_loader=loader,
            target_epsilon=self.target_epsilon,
            target_delta=self.target_delta,
            noise_multiplier=self.noise_multiplier,
            epochs=_planned_epochs(trainer, len(PoissonLoader.from_data_loader(loader))),
            **self._options,
        )
        if self._saved is not None:
            self.engine.load_state_dict(self._saved, module=pl_module)
            self._saved = None
        trainer.optimizers = [optimizer]

        def rehearse(batch: Any) -> None:
            self._is_rehearsing = True
            try:
                self._train_on(trainer, pl_module, batch, 0)
            finally:
                self._is_rehearsing = False

        self._steps = LogicalSteps(optimizer, private, rehearse, functools.partial(self._stop, trainer))
        return self._steps

    def _stop(self, trainer: Any) -> None:
        warnings.warn(
            f"the budget of epsilon {self.target_epsilon:g} at delta {self.target_delta:g} is spent after "
            f"{self.engine.accountant.ledger.steps} steps: training ends here",
            stacklevel=2,
        )
        trainer.should_stop = True

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Puts everything back."""
        self._evaluation.close()
        self._patches.close()
        if self._steps is not None and stage == "fit":
            trainer.optimizers = [self._steps.optimizer.original_optimizer]
            self._steps.optimizer.gradients.remove()  # autograd computes the model's gradients again

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As :meth:`teardown`, which Lightning leaves out then."""
        self.teardown(trainer, pl_module, "fit")

    # A step.

    def _private_training_step(self, trainer: Any, pl_module: Any) -> Callable[..., Any]:
        """The module's ``training_step`` over all physical batches of a logical step, the last of which it returns."""
        original = pl_module.training_step

        @functools.wraps(original)
        def training_step(batch: Any, *others: Any) -> Any:
            if not trainer.training:  # a validation_step may call it, too
                return original(batch, *others)
            steps = self._steps
            assert steps is not None
            while not steps.current.is_last:
                if steps.current.size:
                    _backward(trainer, original(batch, *others))
                batch = _to_device(trainer, pl_module, steps.next_piece())
            # Of no records there is noise alone: a mean over them is not a number, and many models refuse them.
            if steps.current.size == 0:
                return torch.zeros((), device=trainer.strategy.root_device, requires_grad=True)
            output = original(batch, *others)
            _loss_of(output)
            return output

        return training_step

    def _train_on(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Forward and backward pass over a batch that Lightning does not know of."""
        assert self._steps is not None
        if self._steps.current.size == 0:
            return
        training_step = pl_module.training_step.__wrapped__
        takes_index = len(inspect.signature(training_step).parameters) > 1
        with trainer.precision_plugin.train_step_context():
            batch = _to_device(trainer, pl_module, batch)
            _backward(trainer, training_step(batch, batch_idx) if takes_index else training_step(batch))

    # What is said about the training.

    def _private_log(self, trainer: Any, pl_module: Any) -> Callable[..., None]:
        original, warned = pl_module.log, False

        @functools.wraps(original)
        def log(name: str, *args: Any, **kwargs: Any) -> None:
            nonlocal warned
            if trainer.training and trainer.world_size > 1 and self.unsafe_diagnostics and kwargs.get("sync_dist"):
                raise ValueError(
                    f"{name!r} is logged with sync_dist=True while the module trains. Processes make different numbers "
                    "of passes in a step, so they would wait for each other: leave sync_dist out"
                )
            if not trainer.training or (self.unsafe_diagnostics and not self._is_rehearsing):
                original(name, *args, **kwargs)
            elif not warned and not self._is_rehearsing:
                warned = True
                warnings.warn(
                    f"{name!r} is not logged, nor is anything else that the module logs while it trains: it is a "
                    "function of the raw data that no budget covers. Log it in validation_step, or set "
                    "DifferentialPrivacy(unsafe_diagnostics=True)",
                    stacklevel=2,
                )

        return log

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs epsilon."""
        self.log("epsilon", self.epsilon, prog_bar=True)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Lets metrics of the module count: what they count is no training data."""
        if self._steps is not None:
            self._evaluation.enter_context(self._steps.optimizer.gradients.state.paused())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """See :meth:`on_validation_start`."""
        self._evaluation.close()

    # Checkpoints.

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the ledger, sealed together with the weights, which are in the file once for both."""
        if self._steps is not None:
            checkpoint[CHECKPOINT] = self.engine.state_dict(module=pl_module)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remembers the ledger until the run is set up.

        Weights that ``test`` or ``validate`` load while this engine has a ledger are of its own run: nothing to resume.
        """
        if trainer.state.fn == "fit" or not self.engine.accountant.history:
            self._saved = checkpoint.get(CHECKPOINT)


def _of_all_processes(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Returns a loader of all records if Lightning has given this process a part of them, or else the loader."""
    if type(loader.sampler) is not DistributedSampler:
        return loader
    return PoissonLoader(loader.dataset, batch_size=loader.batch_size or 0, like=loader)


def _to_device(trainer: Any, pl_module: Any, batch: Any) -> Any:
    """What Lightning does with a batch before ``training_step`` sees it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _loss_of(output: Any) -> Tensor:
    """The loss in what ``training_step`` returned."""
    loss = output["loss"] if isinstance(output, Mapping) else output
    if loss is None:
        raise RuntimeError(
            "training_step returned None, which skips its records: return the loss whatever the batch holds. Samples "
            "whose gradients are not finite count as zero by themselves"
        )
    return loss


def _backward(trainer: Any, output: Any) -> None:
    loss = _loss_of(output)
    with torch.autocast(loss.device.type, enabled=False):  # training_step is called in one, a backward pass is not
        trainer.strategy.backward(loss, trainer.optimizers[0])


def _keeps_the_model(strategy: Any) -> bool:
    """Returns whether a strategy trains the module itself, in processes that run the whole script."""
    if type(strategy) is DDPStrategy:
        return bool(strategy._start_method == "popen")  # others would leave the ledger in processes that end
    return type(strategy) is SingleDeviceStrategy


def _planned_epochs(trainer: Any, steps_per_epoch: int) -> float | None:
    """How many times ``len(loader)`` steps ``fit`` will make; None if that is not limited."""
    limit = trainer.limit_train_batches
    epoch = min(limit, steps_per_epoch) if isinstance(limit, int) else int(limit * steps_per_epoch)
    limits = [trainer.max_epochs * epoch] if trainer.max_epochs not in (None, -1) else []
    limits += [trainer.max_steps] if trainer.max_steps != -1 else []
    return min(limits) / steps_per_epoch if limits else None


def _refuse(trainer: Any, pl_module: Any) -> None:
    """Raises ``ValueError`` if the trainer is told to do what private training cannot do, with what to do instead."""
    problems = {
        f"accumulate_grad_batches={trainer.accumulate_grad_batches}": (
            trainer.accumulate_grad_batches != 1,
            "leave it out: batch_size of the DataLoader is the size of a whole step, and max_physical_batch_size of "
            "this callback how much of it is in memory at once",
        ),
        f"gradient_clip_val={trainer.gradient_clip_val}": (
            trainer.gradient_clip_val is not None,
            "it clips the gradient of the batch: leave it out, and set max_grad_norm of this callback, for every "
            "sample",
        ),
        f"strategy {type(trainer.strategy).__name__} on {trainer.world_size} devices": (
            not _keeps_the_model(trainer.strategy),
            'use Trainer(strategy="ddp"), with or without torchrun, or one process: Trainer(devices=1)',
        ),
        f"one device for each of {os.environ.get('WORLD_SIZE')} processes that do not know each other": (
            trainer.world_size == 1 and int(os.environ.get("WORLD_SIZE") or 1) > 1,
            f"each would train a model of its own: use Trainer(devices={os.environ.get('LOCAL_WORLD_SIZE')}, "
            'strategy="ddp")',
        ),
        "a wrapped model": (
            trainer.strategy.model is not pl_module,
            "what wraps it would average gradients that carry no noise: give fit the module itself",
        ),
        f"precision={trainer.precision!r}": (
            trainer.precision == "16-mixed",
            'its scaler skips steps by what the batch holds: use precision="bf16-mixed"',
        ),
        "automatic_optimization=False": (
            not pl_module.automatic_optimization,
            "leave the steps to Lightning, or use PrivacyEngine with a loop of your own",
        ),
        f"{len(trainer.optimizers)} optimizers": (len(trainer.optimizers) != 1, "use one, with parameter groups"),
        f"overfit_batches={trainer.overfit_batches}": (
            trainer.overfit_batches != 0,
            "leave it out, or give fit a DataLoader of a torch.utils.data.Subset",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs != 0,
            "leave it out: the ledger is for one data set",
        ),
        "training_step(dataloader_iter)": (
            "dataloader_iter" in inspect.signature(pl_module.training_step).parameters,
            "take a batch",
        ),
    }
    refuse_problems("what the Trainer is set up for", problems)
