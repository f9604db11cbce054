"""Follows one record through the model, to find where it first depends on others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Visit(NamedTuple):
    """One call of a module: the record's rows of its inputs and outputs, None for a tensor without such rows."""

    name: str
    kind: str
    inputs: list[Tensor | None]
    outputs: list[Tensor | None]


@contextmanager
def traced(model: nn.Module, samples: int, views: int, position: int | None) -> Iterator[list[Visit]]:
    """Gives a list that is filled with the module calls, in the order in which they end, for one record if any."""
    visits: list[Visit] = []
    if position is None:
        yield visits
        return
    rows = slice(position * views, (position + 1) * views)

    def of_record(value: Any) -> list[Tensor | None]:
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        has_rows = [t.ndim > 0 and len(t) == samples * views for t in tensors]
        return [t.detach()[rows].clone() if r else None for t, r in zip(tensors, has_rows, strict=True)]

    def note(name: str, kind: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            visits.append(Visit(name, kind, of_record((args, kwargs)), of_record(output)))

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(note(name, type(module).__name__), with_kwargs=True))
        yield visits


class Meeting(NamedTuple):
    """Where a record first differs between two batches: at the input of a module, or at its output."""

    name: str
    kind: str
    at_input: bool
    is_first: bool  # no other module came before


def first_difference(ours: list[Visit], theirs: list[Visit], tolerance: float) -> Meeting | None:
    """Returns where a record first differs between two batches, or None if it differs nowhere.

    Rows of different shapes (a sequence that is padded further beside a longer one) are not compared.
    """
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a.name != b.name:
            return None
        at_input = _differ(a.inputs, b.inputs, tolerance)
        if at_input or _differ(a.outputs, b.outputs, tolerance):
            return Meeting(a.name, a.kind, at_input, place == 0)
    return None


def _differ(ours: list[Tensor | None], theirs: list[Tensor | None], tolerance: float) -> bool:
    return any(
        a is not None and b is not None and a.shape == b.shape and not _close(a, b, tolerance)
        for a, b in zip(ours, theirs, strict=False)
    )


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    finite = a.isfinite() & b.isfinite()
    zero = torch.zeros_like(a)
    return float((a - b).where(finite, zero).norm()) <= tolerance * float(b.where(finite, zero).norm() + 1e-12)
