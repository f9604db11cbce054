"""A layer that is run again with random numbers must give the output that was recorded: then it drew the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: How far (relative to the largest of a batch) outputs may be apart that were computed in the same precision.
_SAME = 1e-3


def check_same_output(module: nn.Module, again: Tensor, recorded: Tensor | None) -> None:
    """Raises ``RuntimeError`` unless the second run of a layer with dropout shows the masks of the first.

    Args:
        module: The layer.
        again: The output of the second run.
        recorded: That of the first; None where it is not known.
    """
    name = type(module).__name__
    if recorded is None:
        raise RuntimeError(
            f"whether the dropout inside of {name} can be repeated cannot be told, because its output was changed in "
            "place or computed in another precision: leave the output as it is, leave autocast out for this layer, or "
            "set its dropout to zero and put an nn.Dropout behind it"
        )
    finite = again.isfinite() & recorded.isfinite()
    difference, size = ((t.where(finite, torch.zeros_like(t))).abs() for t in (again - recorded, recorded))
    # Not the largest: one record that is so large that rounding decides must not stop a run.
    if difference.numel() and float((difference > _SAME * size.amax()).double().mean()) > 1 / 8:
        raise RuntimeError(
            f"{name} drew other random numbers when it was run again, so its per-sample gradients cannot be computed: "
            "set its dropout to zero and put an nn.Dropout behind it, or keep the default generators as they are "
            "during its forward pass"
        )
