"""One private step, in the one order that is private: clip each sample, sum, noise the sum once, divide, descend.

This is lines 3 to 16 of the paper's Algorithm 4, around any ``torch.optim`` optimizer.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_dp.gradients.model import ModelGradients, RecordedBatch
from spectral_dp.mechanism.clipping import Clipped, Clipping, NonFiniteWarning
from spectral_dp.mechanism.noise import NoiseSource
from spectral_dp.mechanism.perturbation import add_noise
from spectral_dp.relations import Relation
from spectral_dp.training.opacus_names import OpacusNames
from spectral_dp.training.release_plan import ReleasePlan, plan_release
from spectral_dp.training.sampling import PhysicalBatch

LossReduction = Literal["mean", "sum"]

_REMEDY = (
    "every batch that is drawn must be stepped, whatever it holds, or what was skipped shows in the result and is "
    "missing in the ledger. Drop `if not torch.isfinite(loss): continue`: samples whose gradients are not finite count "
    "as zero by themselves. Drop `if len(x) == 0: continue`: an empty batch is a step with noise alone; if the model "
    "cannot take one, call optimizer.step() for it without a backward pass. To accumulate gradients, use "
    "max_physical_batch_size. Read one batch at a time, not ahead, and to read the data without training use the "
    "original DataLoader, or torch.no_grad()"
)


class PrivateOptimizer(OpacusNames, Optimizer):
    """Wraps an optimizer so that every step uses the released gradient and nothing else.

    It shares parameter groups and state with the wrapped optimizer, so learning-rate schedulers act on either.

    Formal guarantee. What a logical step hands to the wrapped optimizer is a function of one Gaussian mechanism with
    noise multiplier ``noise_multiplier`` on the sum of clipped per-sample gradients, divided by the public
    ``expected_batch_size``. Physical batches of a logical step are clipped and summed as they come; the noise is added
    once, when the last has come. Parameters that no sample touched are released too, as noise.

    Args:
        optimizer: The optimizer to wrap.
        gradients: Per-sample gradients of the model.
        clipping: How contributions are bounded.
        noise_multiplier: ``σ``.
        expected_batch_size: The public divisor.
        noise: Where noise comes from.
        loss_reduction: How the loss combines samples; "mean" is undone before clipping.
        relation: Which data sets are neighbours.
        views: How many augmented views of each sample the model sees, next to each other in the batch; their gradients
            are averaged before clipping.
        current_batch: Tells the size of the physical batch at hand and whether it ends its logical step; None where
            every call of :meth:`step` is a logical step of its own.
        before_release: Called with the plan of every release before it leaves: the ledger's entry, so that none can
            leave without one.

    Attributes:
        rehearsal: Is shown what the batches of a rehearsal recorded; they are not summed, and nothing is released. None
            when it is over: until then, other batches cannot be stepped.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: ModelGradients,
        *,
        clipping: Clipping,
        noise_multiplier: float,
        expected_batch_size: float,
        noise: NoiseSource,
        loss_reduction: LossReduction = "mean",
        relation: Relation = Relation.ADD_OR_REMOVE_ONE,
        views: int = 1,
        current_batch: Callable[[], PhysicalBatch | None] = lambda: None,
        before_release: Callable[[ReleasePlan], None] = lambda plan: None,
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', as the loss is made, got {loss_reduction!r}")
        if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
            raise ValueError(f"expected_batch_size must be finite and positive, got {expected_batch_size}")
        if views < 1:
            raise ValueError(f"views must be at least 1, got {views}")
        self.original_optimizer = optimizer
        self.gradients = gradients
        self.clipping = clipping
        self.noise_multiplier = noise_multiplier
        self.expected_batch_size = expected_batch_size
        self.noise = noise
        self.loss_reduction = loss_reduction
        self.relation = relation
        self.views = views
        self.steps = 0
        self.rehearsal: Callable[[list[RecordedBatch]], None] | None = None
        self._current_batch = current_batch
        self._before_release = before_release
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._logical_step: tuple[int, int] | None = None
        self._consumed: PhysicalBatch | None = None
        self._pieces = 0  # of the logical step, summed so far
        self._read_only: int | None = None  # the last epoch of which a batch was read without training
        self._bounded_by: tuple[Clipping, float, tuple[int, ...]] | None = None
        self._released: dict[nn.Parameter, tuple[Tensor, int]] = {}  # the last one, and how often it had been changed
        self._check_parameters()
        for name in dir(Optimizer):  # hooks belong to the wrapped optimizer, whose step it is
            if name.startswith("register_"):
                setattr(self, name, getattr(optimizer, name))
        gradients.begin_step(0)

    # Shared with the wrapped optimizer, so that schedulers and checkpoints see one thing.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of the wrapped optimizer."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.original_optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the wrapped optimizer."""
        self.original_optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients and what backward passes have recorded; the sums of the logical step so far are kept."""
        self.gradients.discard()
        self.original_optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the model to the wrapped optimizer."""
        given = param_group["params"]
        for parameter in [given] if isinstance(given, Tensor) else given:
            if parameter not in self.gradients.parameters:
                raise ValueError("only parameters that the model had when it was made private can be trained privately")
        self.original_optimizer.add_param_group(param_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateOptimizer:
        raise TypeError("a private optimizer belongs to one run and its ledger: copy the model, or save a checkpoint")

    def __repr__(self) -> str:
        settings = f"{self.clipping}, noise_multiplier={self.noise_multiplier:g}"
        return f"PrivateOptimizer({self.original_optimizer!r}, {settings})"

    @property
    def is_within_step(self) -> bool:
        """Whether some pieces of a logical step have been summed, and others are still to come."""
        return self._pieces > 0

    def resume(self, steps: int) -> None:
        """Goes on as after ``steps`` logical steps; what was summed of an incomplete one is dropped."""
        self.steps = steps
        self._sums, self._pieces = {}, 0
        self.gradients.begin_step(steps)

    def release_plan(self) -> ReleasePlan:
        """Returns what the coming release will consist of: its blocks, their bounds and the noise on them."""
        return plan_release(
            self.gradients,
            self.clipping,
            noise_multiplier=self.noise_multiplier,
            relation=self.relation,
            expected_batch_size=self.expected_batch_size,
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Adds the batch at hand to the logical step; if it is the last of it, releases and descends."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        current = self._current_batch()
        if current is not None and current.is_rehearsal:
            self._rehearse(current)
            return loss
        if self.rehearsal is not None:
            raise RuntimeError(
                "the rehearsal of this training loop is not over, so it is not known whether records meet: take the "
                "batches from the loader with gradients enabled (not under torch.no_grad()) and step each of them. "
                "make_private(rehearsal=False) switches it off"
            )
        self._accumulate()
        if current is None or current.is_last:
            self._release()
            self._check_only_released()
            self.original_optimizer.step()
        return loss

    @torch.no_grad()
    def _accumulate(self) -> None:
        """Clips every sample of the physical batch and adds it to the sums."""
        batches = self.gradients.take_all(self.views)
        self._check_samples(batches)
        self._check_no_other_gradients()
        current = self._current_batch()
        if current is not None and current.step != self._logical_step:
            # What a logical step that was broken off has summed was never released, and is not part of this one.
            self._sums, self._pieces = {}, 0
            self._logical_step = current.step
        self._check_unchanged(begins=not self._sums)
        self._check_complete(current)
        self._consumed = current
        self._pieces += 1
        for batch in batches:
            self._add(batch)

    @torch.no_grad()
    def _rehearse(self, current: PhysicalBatch) -> None:
        """Shows the rehearsal what the user's loop made of a batch that belongs to no step."""
        batches = self.gradients.take_unchecked(self.views)
        self._check_samples(batches)
        self._check_no_other_gradients()
        self._consumed = current
        if self.rehearsal is not None:
            self.rehearsal(batches)
        for parameter in self.gradients.trained:  # as after a step: a loop may look at them
            parameter.grad = torch.zeros_like(parameter)

    def _add(self, batch: RecordedBatch) -> None:
        # The mean over a batch divided every sample's loss by the batch's size; views are averaged.
        scale = batch.size if self.loss_reduction == "mean" else 1.0 / self.views
        squared_norms = batch.squared_norms() * scale**2
        factors = self.clipping.factors(squared_norms)
        if not bool(squared_norms.isfinite().all()):
            # Without numbers: how many samples a batch has is private, and warnings end up in log files.
            warnings.warn(
                "the gradients of some samples are not finite and count as zero: check the loss for NaN and the data "
                "for outliers, or lower the learning rate",
                NonFiniteWarning,
                stacklevel=4,
            )
        for parameter, value in batch.clipped_sums(factors * scale).items():
            self._sums[parameter] = self._sums[parameter] + value if parameter in self._sums else value

    @torch.no_grad()
    def _release(self) -> None:
        """Noise on the sums, once; then the public rest: post-gain, inverse transform, divisor."""
        self._check_unchanged(begins=not self._sums)
        plan, parameters = self.release_plan(), self.gradients.named_parameters
        self._check_planned(plan)
        self._before_release(plan)
        sums, self._sums, self._pieces = self._sums, {}, 0
        for block in plan.blocks:
            for planned in block.parameters:
                parameter = parameters[planned.name]
                value = sums.pop(parameter) if parameter in sums else self.gradients.zeros(parameter)
                noisy = add_noise(Clipped(value, block.max_norm), plan.noise_multiplier, self.noise, plan.relation)
                self.gradients.observe(parameter, noisy, block.noise_std)
                gradient = self.gradients.gradient(parameter, noisy) / plan.expected_batch_size
                parameter.grad = gradient.to(parameter.dtype)
                self._released[parameter] = (parameter.grad, parameter.grad._version)
        self.steps += 1
        self.gradients.begin_step(self.steps)

    def _check_samples(self, batches: list[RecordedBatch]) -> None:
        """A batch must be seen exactly once: seen twice, its samples would count twice."""
        current, recorded = self._current_batch(), sum(batch.size for batch in batches)
        if current is None and len(batches) != 1:
            raise RuntimeError(
                f"step() after {len(batches)} backward passes through the private model: without the loader that "
                "make_private returned, call backward() exactly once before each step()"
            )
        if current is not None and current is self._consumed:
            raise RuntimeError(
                "this batch has been stepped already: a second step on the same samples is not what the ledger would "
                "account for. Take the next batch from the loader"
            )
        if current is not None and recorded != current.size:  # how many is secret: messages end up in log files
            raise RuntimeError(
                f"backward passes through the private model saw {'more' if recorded > current.size else 'fewer'} "
                "samples than the loader handed out: call backward() exactly once for every sample of a batch, then "
                "step(). (Two losses of the same samples: add them and call backward() once. Layers that take another "
                "dimension than the first for the batch: use batch_first=True. Several views of each sample: "
                "augmentation_multiplicity. Another model than the one made private? Train the one that make_private "
                "returned.)"
            )

    def _check_complete(self, current: PhysicalBatch | None) -> None:
        """The pieces of a logical step, and the steps of an epoch, come one after the other, none left out."""
        if current is not None and (current.piece != self._pieces or current.step[0] == self._read_only):
            raise RuntimeError(f"a batch before this one was not stepped, so its records are missing: {_REMEDY}")

    def require_taken(self, batch: PhysicalBatch) -> None:
        """Raises an error if a batch was not stepped: the loader asks when it is to move on.

        A step that is skipped because of what the batch holds (a loss that is not finite, no records) tells what it
        held, and the ledger would not list it. Under ``torch.no_grad()`` the loader may be read without training.
        """
        if batch is self._consumed:
            return
        last = self._consumed
        trained_on = last is not None and not last.is_rehearsal and last.step[0] == batch.step[0]
        if torch.is_grad_enabled() or trained_on:
            raise RuntimeError(f"the loader was asked for the next batch, but the last was not stepped: {_REMEDY}")
        self._read_only = batch.step[0]

    def _check_unchanged(self, *, begins: bool) -> None:
        """All samples of a logical step are bounded alike, and noised by the same bounds."""
        now = (self.clipping, self.noise_multiplier, tuple(map(id, self.gradients.trained)))
        if not begins and now != self._bounded_by:
            raise RuntimeError(
                "clipping, noise, or what is trained, was changed within a logical step: how many pieces a step has is "
                "secret, so a schedule must not follow it. Change it after a step() that released, when "
                "loader.current.is_last, or once an epoch"
            )
        self._bounded_by = now

    def _check_planned(self, plan: ReleasePlan) -> None:
        """What was summed is what the plan is for, coordinate by coordinate."""
        for planned in (planned for block in plan.blocks for planned in block.parameters):
            value = self._sums.get(self.gradients.named_parameters[planned.name])
            if value is not None and value.numel() != planned.coordinates:
                raise RuntimeError(
                    f"{value.numel()} coordinates of {planned.name} were summed, but {planned.coordinates} are to be "
                    "released: the rule of its layer must sum what its coefficient_shape says"
                )

    def _check_no_other_gradients(self) -> None:
        """Plain gradients of parameters come from uses outside their layers, which nobody clips."""
        for parameter in self._all_parameters():
            if (grad := parameter.grad) is not None and not self._is_released(parameter) and bool(grad.any()):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} got a gradient outside its layer's forward pass, "
                    "which is neither clipped nor noised: use parameters through their layers only, and replace "
                    "penalties in the loss by the optimizer's weight_decay. (Left from before? Call zero_grad first)"
                )

    def _check_only_released(self) -> None:
        """Last look before the wrapped optimizer moves anything."""
        for parameter in self._all_parameters():
            grad = parameter.grad
            if grad is not None and not self._is_released(parameter) and bool(grad.any()):
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} in the optimizer has a gradient that this step did "
                    "not release: freeze parameters before the forward pass, not between backward() and step()"
                )

    def _all_parameters(self) -> Iterator[nn.Parameter]:
        return iter(dict.fromkeys([*self.gradients.trained, *(p for g in self.param_groups for p in g["params"])]))

    def _is_released(self, parameter: nn.Parameter) -> bool:
        tensor, version = self._released.get(parameter, (None, 0))
        return parameter.grad is tensor and tensor is not None and tensor._version == version

    def _check_parameters(self) -> None:
        mine = {p for group in self.param_groups for p in group["params"]}
        trained = set(self.gradients.trained)
        if not trained & mine:
            raise ValueError("the optimizer holds no trained parameter of the model: unfreeze one, or build it anew")
        self.clipping.noise_bounds(
            [1] * len(self.gradients.trained_blocks)
        )  # as many bounds as blocks, or an error now
        if foreign := sum(p.requires_grad for p in mine - trained):
            raise ValueError(
                f"the optimizer holds {foreign} parameters that are not the model's: build it from the model's own"
            )
