"""The private step: clip each sample, sum, add noise to the sum once, divide, descend. Only this order is private.

These are lines 3 to 16 of the paper's Algorithm 4, around any ``torch.optim`` optimizer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spectral_dp.gradients.model import ModelGradients, RecordedBatch
from spectral_dp.mechanism.clipping import Clipped, Clipping, NonFiniteWarning
from spectral_dp.mechanism.noise import NoiseSource
from spectral_dp.mechanism.perturbation import NoisySums, add_noise_to_each
from spectral_dp.relations import Relation
from spectral_dp.training.denoising.noise_aware import NoiseAware
from spectral_dp.training.noise_levels import gradient_noise
from spectral_dp.training.opacus_names import OpacusNames
from spectral_dp.training.release_plan import ReleasePlan, plan_release
from spectral_dp.training.sampling import PhysicalBatch
from spectral_dp.training.wrapped_optimizer import WrappedOptimizer, loss_of

LossReduction = Literal["mean", "sum"]

_REMEDY = (
    "every batch that is drawn must be stepped, whatever it holds, or what was skipped shows in the result and is "
    "missing in the ledger. Drop `if not torch.isfinite(loss): continue`: samples whose gradients are not finite count "
    "as zero by themselves. Drop `if len(x) == 0: continue`: an empty batch is a step with noise alone; if the model "
    "cannot take one, call optimizer.step() for it without a backward pass. To accumulate gradients, use "
    "max_physical_batch_size. Read one batch at a time, not ahead, and to read the data without training use the "
    "original DataLoader, or torch.no_grad()"
)
_OUTSIDE = (
    "got a gradient outside its layer's forward pass, which is neither clipped nor noised: use parameters through "
    "their layers only, and replace penalties in the loss by the optimizer's weight_decay. (Left from before? Call "
    "zero_grad first)"
)
_NOT_RELEASED = (
    "in the optimizer has a gradient that this step did not release: freeze parameters before the forward pass, not "
    "between backward() and step()"
)


class PrivateOptimizer(OpacusNames, WrappedOptimizer):
    """Wraps an optimizer so that every step uses the released gradient and nothing else.

    It shares parameter groups and state with the wrapped optimizer, so learning-rate schedulers can act on either.

    Formal guarantee. A logical step passes only post-processed output of one Gaussian mechanism to the wrapped
    optimizer:

    * What is bounded: the contribution of each sample to the sum of clipped gradients, by ``clipping``. Physical
      batches are clipped and summed one by one. The noise is added once, after the last of them.
    * For which neighbours: those of ``relation``, with noise multiplier ``noise_multiplier``.
    * Under which assumptions: samples are treated independently, and the divisor ``expected_batch_size`` is public.
      A parameter that no sample used is released too, as noise alone.

    Args:
        optimizer: The optimizer to wrap.
        gradients: The recorder of the model's per-sample gradients.
        clipping: How the contribution of a sample is bounded.
        noise_multiplier: ``σ``, the deviation of the noise in units of the sensitivity.
        expected_batch_size: The public number by which the noisy sum is divided.
        noise: The source of the noise.
        loss_reduction: How the loss combines samples. A ``"mean"`` is undone before clipping.
        relation: Which data sets are neighbours.
        views: The number of augmented views of each sample, which lie next to each other in the batch. Their gradients
            are averaged before clipping.
        current_batch: A function that returns a description of the current physical batch, or None if every call of
            :meth:`step` is a logical step.
        before_release: A function that is called with the plan of each release before the release happens. It enters
            the release in the ledger, so that none can happen without an entry.
        noisy_sums: A function that adds noise to all sums of a release. If several processes train together, it also
            adds the sums of the others (see ``distributed/``).

    Attributes:
        rehearsal: A function that receives what the batches of a rehearsal recorded, or None if no rehearsal is left.
            Until it is None, other batches cannot be stepped.
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
        noisy_sums: NoisySums = add_noise_to_each,
    ) -> None:
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', as the loss is made, got {loss_reduction!r}")
        if not (math.isfinite(expected_batch_size) and expected_batch_size > 0):
            raise ValueError(f"expected_batch_size must be finite and positive, got {expected_batch_size}")
        if views < 1:
            raise ValueError(f"views must be at least 1, got {views}")
        super().__init__(optimizer)
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
        self._noisy_sums = noisy_sums
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._logical_step: tuple[int, int] | None = None
        self._consumed: PhysicalBatch | None = None
        self._pieces = 0  # physical batches of the logical step that were summed
        self._read_only: int | None = None  # the last epoch of which a batch was read without training
        self._bounded_by: tuple[Any, ...] | None = None
        self._released: dict[nn.Parameter, tuple[Tensor, int]] = {}  # last gradient and its version
        self._check_parameters()
        gradients.begin_step(0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients and what backward passes have recorded. The sums of the current logical step are kept."""
        self.gradients.discard()
        self.original_optimizer.zero_grad(set_to_none)
        # Or they would be held, as large as the model, until the next release. A parameter that the wrapped optimizer
        # does not clear keeps its gradient, which is still the released one.
        self._released = {p: last for p, last in self._released.items() if p.grad is last[0]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters of the model to the wrapped optimizer."""
        given = param_group["params"]
        for parameter in [given] if isinstance(given, Tensor) else given:
            if parameter not in self.gradients.parameters:
                raise ValueError("only parameters that the model had when it was made private can be trained privately")
        self.original_optimizer.add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        # Torch would let a copy patch the class itself, and then no private optimizer of this process could step.
        raise TypeError(
            "a private optimizer belongs to one run and its ledger, and cannot be copied: copy the model, or save a "
            "checkpoint or its state_dict()"
        )

    def __repr__(self) -> str:
        settings = f"{self.clipping}, noise_multiplier={self.noise_multiplier:g}"
        return f"PrivateOptimizer({self.original_optimizer!r}, {settings})"

    @property
    def is_within_step(self) -> bool:
        """Whether some, but not all, physical batches of a logical step have been summed."""
        return self._pieces > 0

    def resume(self, steps: int) -> None:
        """Continues as after ``steps`` logical steps. The sums of an incomplete step are dropped."""
        self.steps = steps
        self._sums, self._pieces = {}, 0
        self.gradients.begin_step(steps)

    def release_plan(self) -> ReleasePlan:
        """Returns the plan of the next release: its blocks, their bounds and their noise."""
        return plan_release(
            self.gradients,
            self.clipping,
            noise_multiplier=self.noise_multiplier,
            relation=self.relation,
            expected_batch_size=self.expected_batch_size,
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Adds the current batch to the logical step. If it is the last one, releases the gradient and descends.

        ===================================================  ==========================================================
        Case                                                 What happens
        ===================================================  ==========================================================
        the batch does not complete its logical step         it is clipped and summed; no release, no descent
        the batch is empty (a backward pass is not needed)   noise alone is released; the step counts in the ledger
        the gradient of a sample is not finite               the sample counts as zero; ``NonFiniteWarning``
        a parameter was not used in the forward pass         it is released as noise alone
        a batch was skipped, or is stepped a second time     ``RuntimeError``
        backward passes saw more or fewer samples            ``RuntimeError``
        a parameter was used outside its layer (a penalty)   ``RuntimeError``: that gradient is not clipped
        clipping or noise changed within a logical step      ``RuntimeError``
        the loop broke off within a logical step             its sums are dropped and never released
        the budget does not allow another step               ``BudgetExhausted``; nothing is released
        the batch belongs to a rehearsal                     its gradients are checked; nothing is released or changed
        ===================================================  ==========================================================

        Args:
            closure: A function that computes the loss and calls ``backward()``, as for any ``torch.optim`` optimizer.

        Returns:
            What the closure returned, or None without one.
        """
        loss = loss_of(closure)
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
            self._check_gradients(_NOT_RELEASED)
            self.original_optimizer.step()
        return loss

    @torch.no_grad()
    def _accumulate(self) -> None:
        """Clips every sample of the physical batch and adds it to the sums."""
        batches = self.gradients.take_all(self.views)
        self._check_samples(batches)
        self._check_gradients(_OUTSIDE)
        current = self._current_batch()
        step = None if current is None else current.step  # without a loader every batch is a step of its own
        if step is None or step != self._logical_step:
            # The sums of a logical step that was broken off were not released and do not belong to this step.
            self._sums, self._pieces = {}, 0
            self._logical_step = step
        self._check_unchanged()
        if current is not None and (current.piece != self._pieces or current.step[0] == self._read_only):
            raise RuntimeError(f"a batch before this one was not stepped, so its records are missing: {_REMEDY}")
        self._consumed = current
        self._pieces += 1
        more_to_come = current is not None and not current.is_last
        for batch in batches:
            self._add(batch, to_be_kept=more_to_come or batch is not batches[-1])

    @torch.no_grad()
    def _rehearse(self, current: PhysicalBatch) -> None:
        """Passes the gradients of a batch that belongs to no step to the rehearsal."""
        batches = self.gradients.take_unchecked(self.views)
        self._check_samples(batches)
        self._check_gradients(_OUTSIDE)
        self._consumed = current
        if self.rehearsal is not None:
            self.rehearsal(batches)
        for parameter in self.gradients.trained:  # as after a step, because a loop may read them
            parameter.grad = torch.zeros_like(parameter)

    def _add(self, batch: RecordedBatch, to_be_kept: bool) -> None:
        # A mean has divided the loss of every sample by the batch size; this is undone. Views are averaged.
        scale = batch.size if self.loss_reduction == "mean" else 1.0 / self.views
        squared_norms = batch.squared_norms() * scale**2
        factors = self.clipping.factors(squared_norms)
        if not bool(squared_norms.isfinite().all()):
            # The message has no numbers: the size of a batch is secret, and warnings are written to log files.
            warnings.warn(
                "the gradients of some samples are not finite and count as zero: check the loss for NaN and the data "
                "for outliers, or lower the learning rate",
                NonFiniteWarning,
                stacklevel=4,
            )
        for parameter, value in batch.clipped_sums(factors * scale).items():
            if parameter in self._sums:
                self._sums[parameter] = self._sums[parameter] + value
            else:  # a rule may fill the same memory again for the next batch, and these records would count twice
                self._sums[parameter] = value.clone() if to_be_kept else value

    @torch.no_grad()
    def _release(self) -> None:
        """Adds noise to the sums, once. The rest is post-processing: post-gain, inverse transform, public divisor."""
        self._check_unchanged()
        plan, parameters = self.release_plan(), self.gradients.named_parameters
        self._check_planned(plan)
        self._before_release(plan)
        sums, self._sums, self._pieces = self._sums, {}, 0
        planned = [(block, parameters[each.name]) for block in plan.blocks for each in block.parameters]
        clipped = (
            Clipped(sums.pop(p) if p in sums else self.gradients.zeros(p), block.max_norm) for block, p in planned
        )
        released = self._noisy_sums(clipped, plan.noise_multiplier, self.noise, plan.relation)
        for (block, parameter), noisy in zip(planned, released, strict=True):
            self.gradients.observe(parameter, noisy, block.noise_std)
            gradient = self.gradients.gradient(parameter, noisy).div_(plan.expected_batch_size)
            parameter.grad = gradient.to(parameter.dtype)
        # Only now: gradients that are parts of one tensor, as of several processes, have one version.
        self._released = {p: (p.grad, p.grad._version) for _, p in planned if p.grad is not None}
        if isinstance(self.original_optimizer, NoiseAware):
            noise = gradient_noise(plan, self.gradients)
            self.original_optimizer.noise_std = {parameters[name]: std for name, std in noise.items()}
        self.steps += 1
        self.gradients.begin_step(self.steps)

    def _check_samples(self, batches: list[RecordedBatch]) -> None:
        """Raises ``RuntimeError`` unless every sample was seen once. Seen twice, it would count twice."""
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
        if current is not None and recorded != current.size:  # the numbers are secret
            raise RuntimeError(
                f"backward passes through the private model saw {'more' if recorded > current.size else 'fewer'} "
                "samples than the loader handed out: call backward() exactly once for every sample of a batch, then "
                "step(). (Two losses of the same samples: add them and call backward() once. Layers that take another "
                "dimension than the first for the batch: use batch_first=True. Several views of each sample: "
                "augmentation_multiplicity. Another model than the one made private? Train the one that make_private "
                "returned.)"
            )

    def require_taken(self, batch: PhysicalBatch) -> None:
        """Raises ``RuntimeError`` if a batch was not stepped. The loader calls this before it moves on.

        If a loop skips a step because of the contents of the batch (a loss that is not finite, no records), the result
        tells something about these contents, and the ledger does not list it. Under ``torch.no_grad()`` the loader can
        be read without training.
        """
        if batch is self._consumed:
            return
        last = self._consumed
        trained_on = last is not None and not last.is_rehearsal and last.step[0] == batch.step[0]
        if torch.is_grad_enabled() or trained_on:
            raise RuntimeError(f"the loader was asked for the next batch, but the last was not stepped: {_REMEDY}")
        self._read_only = batch.step[0]

    def _check_unchanged(self) -> None:
        """Raises ``RuntimeError`` unless clipping, noise and learning rate are the same for all of a logical step.

        A learning rate that follows the pieces would tell how many there were, without noise, in what it makes of the
        weights.
        """
        now = (self.clipping, self.noise_multiplier, tuple(map(id, self.gradients.trained)), self.hyperparameters())
        if self._sums and now != self._bounded_by:
            raise RuntimeError(
                "clipping, noise, the learning rate, or what is trained, was changed within a logical step: how many "
                "pieces a step has is secret, so a schedule must not follow it. Change it after a step() that "
                "released (`if loader.current.is_last: scheduler.step()`), or once an epoch"
            )
        self._bounded_by = now

    def hyperparameters(self) -> list[tuple[str, Any]]:
        """Returns the learning rate and the other numbers in the parameter groups, as they are now."""
        return [
            (name, value.tolist() if isinstance(value, Tensor) else value)
            for group in self.param_groups
            for name, value in group.items()
            if name != "params" and isinstance(value, int | float | tuple | Tensor)
        ]

    def _check_planned(self, plan: ReleasePlan) -> None:
        """Raises ``RuntimeError`` unless the sums have as many coordinates as the plan says."""
        for planned in (planned for block in plan.blocks for planned in block.parameters):
            value = self._sums.get(self.gradients.named_parameters[planned.name])
            if value is not None and value.numel() != planned.coordinates:
                raise RuntimeError(
                    f"{value.numel()} coordinates of {planned.name} were summed, but {planned.coordinates} are to be "
                    "released: the rule of its layer must sum what its coefficient_shape says"
                )

    def _check_gradients(self, complaint: str) -> None:
        """Raises ``RuntimeError`` with this complaint if a parameter has a gradient that was not released."""
        held = (parameter for group in self.param_groups for parameter in group["params"])
        for parameter in dict.fromkeys([*self.gradients.trained, *held]):
            grad, released = parameter.grad, self._released.get(parameter)
            is_released = released is not None and grad is released[0] and grad._version == released[1]
            if grad is not None and not is_released and bool(grad.any()):
                raise RuntimeError(f"a parameter of shape {tuple(parameter.shape)} {complaint}")

    def _check_parameters(self) -> None:
        mine = {p for group in self.param_groups for p in group["params"]}
        trained = set(self.gradients.trained)
        if not trained & mine:
            raise ValueError("the optimizer holds no trained parameter of the model: unfreeze one, or build it anew")
        self.clipping.noise_bounds([1] * len(self.gradients.trained_blocks))  # or an error: one bound for each block
        if foreign := sum(p.requires_grad for p in mine - trained):
            raise ValueError(
                f"the optimizer holds {foreign} parameters that are not the model's: build it from the model's own"
            )
