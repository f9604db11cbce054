"""Tensors that the backward pass reaches: where it is to come, and to end, whatever needs a gradient before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def hookable(tensor: Tensor, *, is_sole: bool = False) -> Tensor:
    """A tensor that the backward pass reaches and whose hooks survive in-place operations.

    Args:
        tensor: The tensor.
        is_sole: Whether nobody else has what it may be a view of, and no backward pass needs it: then no copy is made.
    """
    if tensor._is_view():  # changed in place, a view loses its hooks
        tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape) if is_sole else tensor.clone()
    if not tensor.requires_grad:  # the first layer: make the backward pass come this far all the same
        tensor = Anchor.apply(tensor, anchor_like(tensor))  # type: ignore[no-untyped-call]
    return tensor


class Anchor(torch.autograd.Function):
    """Makes a tensor require a gradient without a copy, and ends the backward pass there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class Widened(torch.autograd.Function):
    """Gives a tensor an entry for each sample, without a copy, and ends the backward pass there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, samples: int, anchor: Tensor) -> Tensor:
        return tensor.expand(samples, *tensor.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        return None, None, None


class Detour(torch.autograd.Function):
    """Leads the backward pass of a module's outputs to a function, and from there to the module's inputs.

    Takes that function, how many outputs there are, the outputs, and those inputs that need a gradient. The graph that
    the module made itself is not used.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[[Any], Sequence[Tensor | None]], count: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.count = function, count
        return tuple(t.clone() for t in tensors[:count])  # no views: they may be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.function([None if g is None else g.detach() for g in grads])
        return (None, None, *[None] * ctx.count, *(found or [None]))


def anchor_like(like: Tensor) -> Tensor:
    """Something that needs a gradient, on the device of a tensor."""
    return torch.empty(0, device=like.device, requires_grad=True)
