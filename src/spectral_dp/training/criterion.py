"""The criterion that ``grad_sample_mode="ghost"`` returns, as Opacus does. Here it needs no second backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

#: Opacus' modes that return model, optimizer and loader. Here they are all the same.
PlainMode = Literal["hooks", "functorch", "ew", "no_op"]
#: The mode that returns the criterion, too, before the loader.
GhostMode = Literal["ghost"]


def check_mode(grad_sample_mode: str) -> None:
    """Refuses modes that Opacus does not have, and those for models that are spread over devices."""
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


class PrivateCriterion:
    """A loss that is the sum, or the plain mean, of the losses of single samples.

    ``criterion(output, target)`` returns an ordinary tensor: ``loss.backward()`` runs once, and norms and clipped sums
    are exact after it.

    Formal guarantee. The loss of a sample does not depend on the others, if it does not in ``criterion`` with
    ``reduction="none"``: the samples' losses are added, and divided by their number where the reduction is the mean.
    So class weights and ignored labels, which a mean of torch's divides by what the whole batch holds, are safe here.

    Args:
        criterion: The loss function. One with a ``reduction``, such as those of ``torch.nn``, is made to return the
            losses of single samples. Another one returns these, or their sum or mean. None is the cross entropy.
        loss_reduction: ``"mean"`` or ``"sum"``, as given to ``make_private``.
    """

    def __init__(self, criterion: Callable[..., Tensor] | None, loss_reduction: Literal["mean", "sum"]) -> None:
        criterion = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
        if getattr(criterion, "reduction", loss_reduction) != loss_reduction:
            raise ValueError(
                f"{type(criterion).__name__} has reduction={getattr(criterion, 'reduction', None)!r}, but "
                f"loss_reduction={loss_reduction!r}: give both the same"
            )
        self.criterion, self.loss_reduction = criterion, loss_reduction
        self._of_each: Any = criterion
        if hasattr(criterion, "reduction"):
            self._of_each = copy.copy(criterion)
            self._of_each.reduction = "none"

    def __call__(self, *args: Any, shape: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
        """Returns the loss of a batch.

        Args:
            *args: What the criterion takes.
            shape: Of ``(B, T, ...)`` outputs that were flattened to ``(B * T, ...)``, such as those of a language
                model. The loss of a sequence is then the mean (or sum) over its positions that are not ignored.
            **kwargs: What the criterion takes.
        """
        losses: Tensor = self._of_each(*args, **kwargs)
        if self.loss_reduction == "sum":
            return losses.sum()
        if shape is None or losses.ndim == 0 or len(losses) != shape[0] * shape[1]:
            return losses.mean()
        ignored = getattr(self.criterion, "ignore_index", None)
        target = kwargs["target"] if "target" in kwargs else args[1]
        positions = losses.view(shape[0], shape[1])
        if ignored is None:
            return positions.mean()
        counted = (target.view(shape[0], shape[1]) != ignored).sum(1).clamp(min=1)
        return (positions.sum(1) / counted).mean()
