"""``PrivateTrainer``: the ``Trainer`` of Hugging Face's transformers, with differential privacy.

    trainer = PrivateTrainer(
        model=model,
        args=TrainingArguments(output_dir="out", per_device_train_batch_size=32, num_train_epochs=3),
        privacy=PrivacyArguments(
            target_epsilon=3.0, target_delta=1e-5, per_sample_max_grad_norm=1.0, expected_batch_size=256
        ),
        train_dataset=dataset,
    )
    trainer.train()

What ``Trainer`` does between the backward pass and the step (dividing by the items of a batch, clipping the gradient of
the batch, scaling it) is switched off or refused: the private optimizer clips every sample, sums, adds noise once and
divides by a public constant. ``docs/integrations.md`` says what is supported.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spectral_dp.files import whole_file
from spectral_dp.integrations.logical_steps import LogicalSteps, make_private
from spectral_dp.integrations.missing import stand_in
from spectral_dp.integrations.training_arguments import PrivacyArguments as PrivacyArguments
from spectral_dp.integrations.training_arguments import refuse_arguments
from spectral_dp.training.checkpoint import CheckpointError
from spectral_dp.training.config import SpectralConfig
from spectral_dp.training.engine import PrivacyEngine
from spectral_dp.training.optimizer import LossReduction
from spectral_dp.training.sampling import PoissonLoader

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME
except ImportError as error:
    Trainer = TrainerCallback = stand_in("transformers", error)

logger = logging.getLogger(__name__)

CHECKPOINT, STATEMENT = "privacy.pt", "privacy.json"

# Methods that are overridden below and are not in the documentation of ``Trainer``: in a version that calls them by
# other names, the overrides would do nothing.
_OVERRIDDEN = (
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_save_rng_state",
    "create_accelerator_and_postprocess",
    "_prepare_for_training",
)

# What the Trainer divides a loss over tokens by, and losses over records where the model lets it: a public constant
# rather than the number of tokens or records in the batch. The loss is then a sum.
_ITEMS = 1

_RAW = ("loss", "train_loss")  # figures of the raw data in the Trainer's logs
_MEANINGLESS = ("grad_norm", "total_flos")  # there are no gradients when it looks, and operations are not counted


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """A ``Trainer`` that trains with differential privacy.

    Formal guarantee. The weights after every step, and with them all checkpoints, are released under
    ``(engine.get_epsilon(δ), δ)``-differential privacy with respect to the records of ``train_dataset``, as
    ``PrivacyEngine`` states it. Not covered: what is computed from ``eval_dataset``, and what callbacks, collators or
    ``compute_loss`` of your own print or keep of the batches they see.

    Every step of the Trainer is one logical step of the engine: a Poisson batch, in as many physical batches as memory
    allows. So ``global_step``, the learning-rate schedule and the number of saved checkpoints do not depend on what was
    drawn.

    Args:
        model: See ``Trainer``.
        args: See ``Trainer``.
        privacy: How private the training is.
        spectral: What is released of each layer; nothing is filtered by default.
        engine: Keeps the ledger; a new one by default.
        **others: The other arguments of ``Trainer``.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        privacy: PrivacyArguments,
        spectral: SpectralConfig | None = None,
        engine: PrivacyEngine | None = None,
        **others: Any,
    ) -> None:
        if lacking := [name for name in _OVERRIDDEN if not hasattr(Trainer, name)]:
            raise ImportError(f"this version of transformers has no Trainer.{lacking[0]}: install one of version 5")
        args = copy.copy(args) if args is not None else TrainingArguments(output_dir="tmp_trainer")
        refuse_arguments(args)
        args.max_grad_norm = 0.0  # that of the whole batch: every sample is clipped instead
        args.ignore_data_skip = True  # coins have no memory, so there is nothing to skip when a run is resumed
        args.average_tokens_across_devices = False  # it multiplies the loss by the number of processes
        self.privacy, self.spectral = privacy, spectral
        self.engine = engine if engine is not None else PrivacyEngine()
        self._steps: LogicalSteps | None = None
        self._records: Any = None  # the data set that these steps draw from
        super().__init__(model, args, **others)
        self.add_callback(_PublicEpoch())

    def create_accelerator_and_postprocess(self) -> None:
        """As in ``Trainer``, but several processes do not wrap the model: what such a wrapper averages has no noise."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if isinstance(self.model_wrapped, nn.parallel.DistributedDataParallel):
            raise RuntimeError(
                "accelerate has wrapped the model in DistributedDataParallel, which would average gradients that carry "
                "no noise: use a version of accelerate with Accelerator.prepare_model(evaluation_mode=)"
            )
        return prepared

    def get_train_dataloader(self) -> Any:
        """Returns the batches of the private run while training; at other times those that ``Trainer`` would give."""
        if not self.is_in_train:
            return super().get_train_dataloader()
        has_this_model = self._steps is not None and self._steps.optimizer.gradients.model is self.model
        if self._steps is not None and has_this_model and self._records is not self.train_dataset:
            self.optimizer = self._steps.optimizer.original_optimizer  # goes on, around other records
        if self._steps is None or not has_this_model or self._records is not self.train_dataset:
            self._steps, self._records = self._make_private(), self.train_dataset
        return self._steps

    def _make_private(self) -> LogicalSteps:
        args, privacy = self.args, self.privacy
        plain = super().get_train_dataloader()
        drawn = PoissonLoader(plain.dataset, batch_size=privacy.expected_batch_size, like=plain)
        reduction: LossReduction = (
            self._find_reduction(drawn) if privacy.loss_reduction == "auto" else privacy.loss_reduction
        )
        optimizer, loader = make_private(
            self.engine,
            module=self.model,
            optimizer=self.create_optimizer(),
            data_loader=drawn,
            target_epsilon=privacy.target_epsilon,
            target_delta=privacy.target_delta,
            noise_multiplier=privacy.noise_multiplier,
            epochs=args.max_steps / len(drawn) if args.max_steps > 0 else args.num_train_epochs,
            max_grad_norm=privacy.per_sample_max_grad_norm,
            max_physical_batch_size=self._train_batch_size,
            clipping=privacy.clipping,
            noise_allocation=privacy.noise_allocation,
            spectral=self.spectral,
            loss_reduction=reduction,
            rehearsal=privacy.rehearsal,
        )
        self.optimizer = optimizer
        return LogicalSteps(optimizer, loader, self._rehearse, self._stop)

    def _require_steps(self) -> LogicalSteps:
        if self._steps is None:
            raise RuntimeError("nothing is private yet: call train()")
        return self._steps

    # Training.

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Trains on all physical batches of a logical step; the step itself, which releases, is the Trainer's to call.

        Returns zero in the place of the loss, which must not reach the logs, unless ``unsafe_diagnostics`` is set. The
        Trainer logs the mean over processes, each of which has a share of the loss of the step.
        """
        steps = self._require_steps()
        loss = self._train_on(model, inputs)
        while not steps.current.is_last:
            loss = loss + self._train_on(model, steps.next_piece())
        return loss * self.args.world_size if self.privacy.unsafe_diagnostics else torch.zeros_like(loss)

    def _train_on(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Runs forward and backward pass over a physical batch; returns its share of the loss of the logical step."""
        steps = self._require_steps()
        size, optimizer = steps.current.size, steps.optimizer
        if size == 0:  # noise alone: a mean over no records is not a number, and many models refuse them
            return torch.zeros((), device=self.args.device)
        self.current_gradient_accumulation_steps = 1  # the Trainer divides by it
        loss: Tensor = super().training_step(model, inputs, _ITEMS)
        return loss * (size if optimizer.loss_reduction == "mean" else 1) / optimizer.expected_batch_size

    def _rehearse(self, batch: Mapping[str, Any]) -> None:
        self._train_on(self.model_wrapped, batch)

    def _stop(self) -> None:
        logger.warning(
            "the budget of epsilon %g at delta %g is spent after %d steps: training ends here",
            self.privacy.target_epsilon,
            self.privacy.target_delta,
            self.engine.accountant.ledger.steps,
        )
        self.control.should_training_stop = True

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """There is no gradient of the batch to clip: every sample's is clipped in the step."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> None:
        """As :meth:`_clip_grad_norm`."""

    def _find_reduction(self, loader: PoissonLoader) -> LossReduction:
        """Whether a batch that holds a record twice has its loss once or twice; the rehearsal checks the gradients."""
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            for i in range(min(8, len(loader.dataset))):  # type: ignore[arg-type]
                batch = dict(loader.collate(loader.read([i])))
                with torch.no_grad():
                    one, two = (
                        float(self.compute_loss(self.model, self._prepare_inputs(inputs), num_items_in_batch=_ITEMS))
                        for inputs in (dict(batch), {name: _twice(value) for name, value in batch.items()})
                    )
                if math.isclose(two, one, rel_tol=1e-3) and one != 0:
                    return "mean"
                if math.isclose(two, 2 * one, rel_tol=1e-3) and one != 0:
                    return "sum"
        finally:
            for module, mode in modes.items():
                module.training = mode
        raise ValueError(
            "it cannot be told whether the loss is the sum or the mean over the records of a batch: set "
            'PrivacyArguments(loss_reduction="sum") or "mean"'
        )

    # What is said about the training.

    @property
    def epsilon(self) -> float:
        """The ``ε`` spent so far at ``target_delta``."""
        return self.engine.accountant.get_epsilon(self.privacy.target_delta)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs epsilon, and nothing of the raw data: no training loss, unless ``unsafe_diagnostics`` is set."""
        raw = {name: logs.pop(name) for name in _RAW if name in logs}
        for name in _MEANINGLESS:
            logs.pop(name, None)
        if self.privacy.unsafe_diagnostics:
            logs |= {f"unsafe_{name}": value for name, value in raw.items()}
        if self._steps is not None:
            logs["epsilon"] = self.epsilon
        super().log(logs, start_time)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer.train``; the training loss in the result is NaN, unless ``unsafe_diagnostics`` is set.

        With ``resume_from_checkpoint=True`` training goes on from the last checkpoint that was saved to its end.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = _last_finished(self.args.output_dir) or True  # without one, Trainer says so
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        return result if self.privacy.unsafe_diagnostics else result._replace(training_loss=math.nan)

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        """Counts nothing: the number of operations tells how many records were drawn, and how long they were."""
        return 0

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refused."""
        raise NotImplementedError(
            "every trial of a search is a private training of its own, and choosing the best by its result costs "
            "privacy too, which nobody would account for: choose hyperparameters on public data, or train one by one "
            "with one engine, which adds up what they spend"
        )

    # Checkpoints.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``Trainer.save_model``, with a statement of what the model has spent beside it."""
        super().save_model(output_dir, _internal_call)
        if self._steps is not None and self.args.should_save:
            with whole_file(Path(output_dir or self.args.output_dir) / STATEMENT) as file:
                file.write(json.dumps(self._statement(), indent=2).encode())

    def _statement(self) -> dict[str, Any]:
        steps, accountant = self._require_steps(), self.engine.accountant
        return {
            "epsilon": self.epsilon,
            "delta": self.privacy.target_delta,
            "neighbours": str(accountant.ledger.relation),
            "accountant": accountant.name,
            "steps": [phase._asdict() for phase in accountant.history],
            "records": len(steps.dataset),  # type: ignore[arg-type]
            "expected_batch_size": steps.optimizer.expected_batch_size,
            "clipping": repr(steps.optimizer.clipping),
            "noise_and_batches_are_secret": getattr(steps.loader, "is_private", True),
            "processes": self.args.world_size,
        }

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self.engine.save_checkpoint(
            path=Path(output_dir) / CHECKPOINT,
            module=_Trained(self.model),
            checkpoint_dict={"global_step": self.state.global_step},
        )

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves nothing: how far dropout has wound the generator on tells how many records were drawn."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        saved = self.engine.load_checkpoint(path=Path(checkpoint) / CHECKPOINT, module=_Trained(self.model))
        if saved.get("global_step") != self.state.global_step:
            raise CheckpointError(
                f"{CHECKPOINT} in {checkpoint} is of step {saved.get('global_step')}, but the state of the Trainer is "
                f"of step {self.state.global_step}: they were not saved together"
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not (Path(resume_from_checkpoint) / CHECKPOINT).is_file():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no {CHECKPOINT}, so its ledger cannot be continued (was the process "
                "killed while it saved, was save_only_model set, or was it another Trainer?): resume from another "
                "one, or, to begin a new private training with its weights, load them with from_pretrained. What they "
                f"have cost the same records ({STATEMENT}) then adds to the new cost"
            )
        super()._load_from_checkpoint(resume_from_checkpoint, model)


class _PublicEpoch(TrainerCallback):  # type: ignore[misc]
    """Counts epochs by steps, also where a run was resumed within one."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        state.epoch = state.global_step / len(others["train_dataloader"])


class _Trained(nn.Module):
    """A model of which only what is trained is saved: the rest of it is where it came from."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns what is trained, by name."""
        trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        return {name: value for name, value in self.model.state_dict().items() if name in trained}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Restores :meth:`state_dict`."""
        return self.model.load_state_dict(state_dict, strict=False)


def _last_finished(directory: str) -> str | None:
    """Returns the last checkpoint that holds the file which ``Trainer`` writes last, if there is one."""
    named = {path.name.removeprefix("checkpoint-"): path for path in Path(directory).glob("checkpoint-*")}
    steps = {int(step): path for step, path in named.items() if step.isdigit()}
    finished = [step for step, path in steps.items() if (path / TRAINER_STATE_NAME).is_file()]
    if not finished:
        return None
    if broken_off := [path.name for step, path in steps.items() if step > max(finished)]:
        logger.warning(
            "the process was killed while it saved %s: training goes on from the checkpoint before. Do not use its "
            "weights: the ledger does not list what they have cost",
            ", ".join(broken_off),
        )
    return str(steps[max(finished)])


def _twice(value: Any) -> Any:
    """The value of a batch of one record, for a batch that holds it twice."""
    if isinstance(value, Tensor) and value.ndim and len(value) == 1:
        return torch.cat([value, value])
    return value * 2 if isinstance(value, list | tuple) and len(value) == 1 else value
