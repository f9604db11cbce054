"""The criterion that ``grad_sample_mode="ghost"`` returns, as in Opacus, but without a second backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

#: Opacus' modes in which model, optimizer and loader are returned. Here they all compute the same.
PlainMode = Literal["hooks", "functorch", "ew", "no_op"]
#: The mode in which the criterion is returned as well, before the loader.
GhostMode = Literal["ghost"]


def check_mode(grad_sample_mode: str) -> None:
    """Raises ``ValueError`` for modes that Opacus does not have, and for those that need several devices."""
    known = (*get_args(PlainMode), *get_args(GhostMode))
    if grad_sample_mode in ("ghost_fsdp", "ghost_tp"):
        raise ValueError(
            f"grad_sample_mode={grad_sample_mode!r} is for models spread over several devices, which are not supported "
            "here: use 'ghost' on one device"
        )
    if grad_sample_mode not in known:
        raise ValueError(
            f"unknown grad_sample_mode {grad_sample_mode!r}: choose one of {', '.join(map(repr, known))}. They compute "
            "the same; 'ghost' returns the criterion, too"
        )


def check_reduction(criterion: Any, loss_reduction: str) -> None:
    """Raises ``ValueError`` for a loss with another reduction than announced."""
    if getattr(criterion, "reduction", loss_reduction) != loss_reduction:
        raise ValueError(
            f"{type(criterion).__name__} has reduction={criterion.reduction!r}, but loss_reduction={loss_reduction!r}: "
            "give both the same, or every gradient is clipped at the wrong scale"
        )


class PrivateCriterion:
    """A loss that is the sum, or the plain mean, of one loss per sample.

    ``criterion(output, target)`` returns an ordinary tensor. After one ``loss.backward()``, norms and clipped sums are
    exact.

    Formal guarantee. The loss of a sample does not depend on other samples:

    * The losses of the samples are added and, if the reduction is the mean, divided by their number only. So class
      weights and ignored labels are safe here. (torch's own mean divides by a number that depends on the whole batch.)
    * The assumption is that ``criterion`` with ``reduction="none"`` treats samples independently.
    * A sample with several losses counts with the mean over those that are not ignored. The rehearsal must find two
      other cases, which divide by the length of the longest sequence: positions that were flattened without giving
      ``shape``, and padding in a loss that has no ``ignore_index``.

    Args:
        criterion: The loss function; None means the cross entropy. If it has a ``reduction``, as the losses of
            ``torch.nn`` do, a copy of it with ``reduction="none"`` is used. If not, it must return one loss per
            sample, or their sum or mean.
        loss_reduction: ``"mean"`` or ``"sum"``, as given to ``make_private``.
    """

    def __init__(self, criterion: Callable[..., Tensor] | None, loss_reduction: Literal["mean", "sum"]) -> None:
        criterion = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
        check_reduction(criterion, loss_reduction)
        self.criterion, self.loss_reduction = criterion, loss_reduction
        self._of_each: Any = criterion
        if hasattr(criterion, "reduction"):
            self._of_each = copy.copy(criterion)
            self._of_each.reduction = "none"

    def __call__(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """Returns the loss of a batch.

        Args:
            *args: Positional arguments for the criterion.
            shape: The shape ``(B, T, ...)`` of outputs that were flattened to ``(B * T, ...)``, such as those of a
                language model. The loss of a sequence is then the mean (or sum) over its positions that are not
                ignored.
            **kwargs: Keyword arguments for the criterion.
        """
        losses: Tensor = self._of_each(*args, **kwargs)
        if self.loss_reduction == "sum":
            return losses.sum()
        if shape is not None and losses.ndim == 1 and len(losses) == shape[0] * shape[1]:
            losses = losses.view(shape[0], shape[1])
        ignored = getattr(self.criterion, "ignore_index", None)
        target = kwargs["target"] if "target" in kwargs else args[1] if len(args) > 1 else None
        if losses.ndim < 2 or ignored is None or target is None or target.numel() != losses.numel():
            return losses.mean()
        # Not by the width of the batch, which is that of its longest sequence.
        counted = (target.reshape(losses.shape) != ignored).flatten(1).sum(1).clamp(min=1)
        return (losses.flatten(1).sum(1) / counted).mean()
