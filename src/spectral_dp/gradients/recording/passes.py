"""One forward pass of a model that is being recorded: how many samples it has, and what they share.

A pass begins when a module of the model is called that no other module of it is calling (its *root*), and ends with
that call. While it lasts, parameters that modules hold themselves are replaced by :class:`Shared` ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spectral_dp.gradients.recording.knowledge import Knowledge, Meeting, numbered
from spectral_dp.gradients.recording.samples import Relation
from spectral_dp.gradients.recording.shared import Operation, Shared, for_each_sample, with_rows
from spectral_dp.gradients.recording.trial import Origins


class Pass:
    """A forward pass.

    Args:
        root: The module that was called.
        args: With which arguments.
        kwargs: And keyword arguments.
        samples: How many there are; None where that cannot be told.
        knowledge: What is known of the model.
        try_out: A function that runs a trial with the samples of a pass and adds what it shows to a new
            :class:`Knowledge`. It returns what went wrong, if anything did.
        holds: Whether parameters that modules hold themselves take part, whose use nobody else looks at.

    Attributes:
        samples: As given.
        origins: Numbers for what happens in it.
        is_over: Whether it has ended: what its samples share is of no use any more.
    """

    def __init__(
        self,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        samples: int | None,
        knowledge: Knowledge,
        try_out: Callable[[Pass, Knowledge], RuntimeError | None],
        holds: bool = False,
    ) -> None:
        self.root, self.args, self.kwargs = root, args, dict(kwargs)
        self.samples = samples
        self.is_over = False
        self._knowledge, self._try_out = knowledge, try_out
        self.origins = Origins(root)
        self._numbers: Counter[int] = Counter()
        self._inputs = {_place(v) for v in tree_leaves((args, self.kwargs)) if isinstance(v, Tensor)}
        self._holds = holds
        self._own: Knowledge | None = None  # what the trial of this pass has shown
        self._failure: RuntimeError | None = None

    def end(self) -> None:
        """Lets go of the batch: what samples share may live on, as long as the loss."""
        self.is_over, self.args, self.kwargs = True, (), {}

    def is_shared(self, origin: int, module: nn.Module, x: Tensor | None, output: Tensor) -> bool:
        """Returns whether the output of a layer is the same for all samples; False if it has rows of each.

        Raises an error if it cannot be told which. An output with as many rows as there are samples is taken to hold
        one of each, without a trial, where the layer was given what the model was given; or what other trained layers
        made of it, and no other dimension is as long, so that samples cannot have changed places with it.
        """
        if self.samples is None or self.samples < 2 or output.ndim == 0:
            return False
        n = output.shape[0]
        is_made_of_it = x is not None and x.requires_grad
        if n == self.samples and x is not None:
            if _place(x) in self._inputs:
                return False
            if is_made_of_it and self.samples not in (*x.shape[1:], *output.shape[1:]):
                return False
        how = self._relation_of_layer(origin, output)
        if how is None and n == self.samples and is_made_of_it:
            return False  # nothing is known that speaks against it
        if getattr(module, "batch_first", True) is False and how != "shared":
            raise RuntimeError(
                f"{type(module).__name__} was made with batch_first=False, so samples are not in the first dimension "
                "of its input: make it with batch_first=True, and give it (samples, steps, features)"
            )
        if how is None or how == "unknown":
            raise RuntimeError(
                f"the output of {type(module).__name__} has neither one row for each sample, nor several side by side, "
                "nor is it the same for all samples, so its per-sample gradients cannot be told apart: keep samples in "
                "the first dimension, and when windows, patches or frames are folded into it, keep those of a sample "
                "next to each other (x.flatten(0, 1) of (samples, frames, ...), without a transpose). It is told by a "
                "run of a few samples in evaluation mode, which must do the same with them as this pass"
            ) from self._failure
        return how == "shared"

    def check_one_row_each(self, origin: int, module: nn.Module, x: Tensor | None, rows: Tensor) -> None:
        """Raises an error unless a layer was given one row of each sample; for those that can do nothing else.

        Args:
            origin: Of its output.
            module: The layer. Where it is the root, its rows *are* the samples.
            x: Its input, with samples in any dimension.
            rows: Something of its output, with samples in the first dimension.
        """
        if self.samples is None or module is self.root:
            return
        if len(rows) == self.samples:
            if self.samples < 2 or (x is not None and (x.requires_grad or _place(x) in self._inputs)):
                return
            if self._relation_of_layer(origin, rows) == "rows":
                return
        raise RuntimeError(
            f"{type(module).__name__} was not given one row for each sample, but what all samples share, or several "
            "rows of each (windows, frames), which it is not supported for: keep samples in the first dimension of "
            f"what {type(self.root).__name__} is called with, give {type(module).__name__} one entry for each of them "
            "(x.expand(len(batch), -1, -1)), and do not fold other dimensions into that of the samples"
        ) from self._failure

    def _relation_of_layer(self, origin: int, output: Tensor) -> Relation | None:
        """What trials have shown, or what the trial of this pass shows; None where none meets the layer."""
        known, samples = self._knowledge, self.samples or 0
        how = known.of_layer(origin, output, samples)
        if how == "unknown" or (how is None and origin not in known.missed):
            how = self._try().of_layer(origin, output, samples) or known.of_layer(origin, output, samples)
            if how is None:
                known.missed.add(origin)
        return how

    def apply(self, operation: Operation) -> Any:
        """Does an operation with shared tensors."""
        if self._knowledge.meets and not self.is_over:
            self._refuse_meeting()
        numbers = self._numbers.copy()
        origin = numbered(numbers, operation.name, operation.origins)
        meeting = None if self.is_over else self._knowledge.of_operation(origin, operation, self.samples or 0)
        if meeting is None:
            if not operation.writes:
                out = operation.plain()
                if not any(isinstance(v, Tensor) for v in tree_leaves(out)):
                    return out  # a shape, a device
            if self.is_over:
                raise RuntimeError(
                    f"{operation.name} of a parameter, or of what samples share, outside of the model's forward pass: "
                    "return what samples have of their own, and replace penalties by the optimizer's weight_decay. "
                    "Functions that are run again in the backward pass (activation checkpointing, a "
                    "torch.autograd.Function) need one entry for each sample: x.expand(len(batch), -1)"
                )
            meeting = self._try().of_operation(origin, operation, self.samples or 0)
            self._refuse_meeting()
        self._numbers = numbers
        if meeting is None or meeting.relation == "unknown":
            raise RuntimeError(_cannot_tell(operation, meeting)) from self._failure
        if meeting.relation == "shared":
            return for_each_sample(operation, origin, self)
        assert self.samples is not None
        return with_rows(operation, meeting.batched, self.samples)

    def _refuse_meeting(self) -> None:
        if self._holds and (name := self._knowledge.meets):
            raise RuntimeError(
                f"samples mix, or change places, in {name}: a sample is not the same without the first of its batch, "
                f"somewhere in {type(self.root).__name__}, which has parameters of its own. Use statistics of one "
                "sample (GroupNorm, LayerNorm), and keep rows in their places"
            )

    def _try(self) -> Knowledge:
        """What the trial of this pass shows; it is run once."""
        if self._own is None:
            self._own = Knowledge()
            self._failure = self._try_out(self, self._own)
            self._knowledge.update(self._own)
        return self._own


def _cannot_tell(operation: Operation, meeting: Meeting | None) -> str:
    return (
        f"cannot tell how the samples of the batch take part in {operation.name} of what they share (a parameter that "
        "a module holds itself, or the output of a layer that was given no samples), so their gradients cannot be told "
        "apart: keep samples, or the rows of a sample side by side, in the first dimension; let parameters be "
        "broadcast over it; or put them into layers of their own (nn.Linear, nn.Embedding)"
        + ("" if meeting else ". It did not happen, or not so, when a few were run by themselves in evaluation mode")
    )


def _place(tensor: Tensor) -> tuple[int, ...]:
    """Where the rows of a tensor are in memory: those of a part of it (``x[:, :5]``) are in the same place."""
    if isinstance(tensor, Shared) or tensor.ndim == 0 or tensor.layout is not torch.strided:
        return ()
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # within vmap: it has no place of its own
        return ()
    return (tensor.untyped_storage().data_ptr(), tensor.stride(0), tensor.shape[0])
