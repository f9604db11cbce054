"""A layer that is run again with random numbers must give the output that was recorded: then it drew the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: How far (relative to their lengths) outputs of a token may be apart that were computed in full precision.
_SAME = 1e-3


def check_same_output(module: nn.Module, again: Tensor, recorded: Tensor | None) -> None:
    """Raises ``RuntimeError`` unless the second run of a layer shows the dropout masks of the first.

    Args:
        module: The layer.
        again: The output of the second run, ``(..., n)``.
        recorded: That of the first, which may be of lower precision; None where it is not known.
    """
    name = type(module).__name__
    if recorded is None:
        raise RuntimeError(
            f"whether the dropout inside of {name} can be repeated cannot be told, because its output was changed in "
            "place: leave the output as it is, or set the dropout to zero and put an nn.Dropout behind the layer"
        )
    tolerance = max(_SAME, 8 * torch.finfo(recorded.dtype).eps)
    first, second = recorded.to(again.dtype), again
    finite = first.isfinite() & second.isfinite()
    difference, length = (t.where(finite, torch.zeros_like(t)).norm(dim=-1) for t in (first - second, first))
    differs = difference > tolerance * length.maximum(length.median()) if length.numel() else length
    # Not all: one record so large that rounding decides must not stop a run.
    if float(differs.double().sum()) > length.numel() / 8:
        raise RuntimeError(
            f"{name} gave another output when it was run again, so its per-sample gradients cannot be computed: it "
            "drew other random numbers (keep the default generators as they are during its forward pass, or set its "
            "dropout to zero and put an nn.Dropout behind it), or something of it was replaced"
        )
