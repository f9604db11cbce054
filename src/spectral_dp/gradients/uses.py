"""One use of a layer, from the backward pass to its clipped sum.

When the backward pass reaches a layer, :func:`condense` decides once what to keep until the clipping factors are known:
the layer's input and output gradient (:class:`Recorded`), or its per-sample gradients instead (:class:`Formed`). Both
classes give norms and clipped sums in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from spectral_dp.gradients.recording.call import Call
from spectral_dp.gradients.rules.held import HeldRule
from spectral_dp.gradients.rules.rule import GhostRule, Rule
from spectral_dp.gradients.sums import memory_order, weighted_sum
from spectral_dp.mechanism.clipping import row_norms

Rows = slice | Tensor
Context = Callable[[], AbstractContextManager[None]]


class FormedOnDemand(Protocol):
    """A use whose per-sample gradients can be formed."""

    def formed(self) -> Formed: ...


@dataclass(frozen=True, eq=False)
class Recorded:
    """A use of a layer whose rule computes norms and sums without per-sample gradients.

    Attributes:
        rule: The rule of the layer.
        x: The input of the layer.
        dA: The gradient of the loss with respect to the output of the layer.
    """

    rule: GhostRule[Any]
    x: Any
    dA: Tensor

    @property
    def rules(self) -> tuple[Rule[Any], ...]:
        """The rules of the layers that were used."""
        return (self.rule,)

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.dA.shape[0]

    @property
    def precision(self) -> float:
        """The machine epsilon of the dtype in which the output gradient arrived."""
        return torch.finfo(self.dA.dtype).eps

    def squared_norms(self) -> Tensor:
        """Returns ``||z_b||²``, ``(B,)``."""
        return self.rule.squared_norms(self.x, self.dA)

    def clipped_sums(self, c: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns ``sum_b c_b z_b`` of every trained parameter."""
        sums = self.rule.clipped_sum(self.x, self.dA, c)
        trained = self.rule.trained()
        _check_complete(self.rule, [name for name in trained if name not in sums])
        return {parameter: sums[name] for name, parameter in trained.items()}

    def select(self, rows: Rows) -> Recorded:
        """Returns the use of some of the samples. In ``x``, all tensors as long as the batch are indexed."""

        def on_leaf(leaf: Any) -> Any:
            return leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == self.size else leaf

        return Recorded(self.rule, tree_map(on_leaf, self.x), self.dA[rows])

    def formed(self) -> Formed:
        """Returns the same use with its per-sample gradients formed."""
        return Formed.of(self.rule, self.x, self.dA)


@dataclass(frozen=True, eq=False)
class Formed:
    """Per-sample gradients of one use of a layer, or the sum over several uses of layers that share parameters.

    They replace the inputs and output gradients of the layers. Norms and sums are computed from the same numbers, so
    rounding errors in these numbers cannot make a norm too small for its sum.

    Attributes:
        rules: The rules of the layers that were used.
        gradients: For each parameter, the coordinates of its gradients that count in the norm, ``(B, ...)``.
        size: The number of samples.
        precision: The machine epsilon of the coarsest dtype in which the output gradients arrived.
    """

    rules: tuple[Rule[Any], ...]
    gradients: dict[nn.Parameter, Tensor]
    size: int
    precision: float

    @classmethod
    def of(cls, rule: Rule[Any], x: Any, dA: Tensor) -> Formed:
        """Forms the gradients of one use."""
        gradients = {rule.parameter(name): z for name, z in rule.form(x, dA).items()}
        return cls((rule,), gradients, len(dA), torch.finfo(dA.dtype).eps)

    @classmethod
    def added(cls, uses: Sequence[FormedOnDemand]) -> Formed:
        """Forms the gradients of several uses and adds those of the same parameter."""
        total: dict[nn.Parameter, Tensor] = {}
        rules: dict[Rule[Any], None] = {}
        precision = 0.0
        for use in uses:
            formed = use.formed()
            rules |= dict.fromkeys(formed.rules)
            precision = max(precision, formed.precision)
            shape = next(iter(rules)).coordinate_shape()
            if any(rule.gains is not None and rule.coordinate_shape() != shape for rule in formed.rules):
                raise ValueError("layers that share a filtered weight must see inputs of one size")
            for parameter, z in formed.gradients.items():
                # Rules may arrange the same numbers in different shapes, such as taps of a kernel in one dimension.
                total[parameter] = total[parameter] + z.reshape(total[parameter].shape) if parameter in total else z
        return cls(tuple(rules), total, formed.size, precision)

    def squared_norms(self) -> Tensor:
        """Returns ``||z_b||²``, ``(B,)``."""
        total: Tensor | None = None
        for z in self.gradients.values():
            squared = row_norms(z if z.ndim <= 2 else z.permute(memory_order(z))).square()
            total = squared if total is None else total.to(squared.device) + squared
        return torch.zeros(self.size, dtype=torch.float64) if total is None else total

    def clipped_sums(self, c: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns ``sum_b c_b z_b`` of every trained parameter."""
        sums: dict[nn.Parameter, Tensor] = {}
        for rule in self.rules:
            trained = rule.trained()
            if isinstance(rule, HeldRule):  # not every pass uses all of them
                trained = {name: parameter for name, parameter in trained.items() if parameter in self.gradients}
            _check_complete(rule, [name for name, parameter in trained.items() if parameter not in self.gradients])
            for name, parameter in trained.items():
                if parameter not in sums:
                    sums[parameter] = rule.released(name, weighted_sum(c, self.gradients[parameter]))
        return sums

    def select(self, rows: Rows) -> Formed:
        """Returns the use of some of the samples."""
        gradients = {parameter: z[rows] for parameter, z in self.gradients.items()}
        size = len(range(self.size)[rows]) if isinstance(rows, slice) else len(rows)
        return Formed(self.rules, gradients, size, self.precision)

    def formed(self) -> Formed:
        """Returns itself."""
        return self


Use = Recorded | Formed


def condense(rule: Rule[Any], x: Any, dA: Tensor, undisturbed: Context = nullcontext) -> Use:
    """Returns what to keep of a use until the clipping factors are known.

    It is called when the backward pass reaches the layer, while ``x`` and ``dA`` are still in the cache. If the
    per-sample gradients are formed, ``x`` and ``dA`` are not kept.

    Args:
        rule: The rule of the layer.
        x: The input of the layer.
        dA: The gradient of the loss with respect to the output of the layer.
        undisturbed: A function that returns the context manager in which gradients are formed.
    """
    if isinstance(rule, GhostRule) and not rule.forms(x, dA):
        return Recorded(rule, x, dA)
    with undisturbed():
        return Formed.of(rule, x, dA)


def condense_rows(rule: Rule[Any], x: Any, dA: Tensor, undisturbed: Context = nullcontext) -> Use:
    """As :func:`condense`, where every sample has several rows, whose gradients are added before the norm is taken.

    Args:
        rule: The rule of the layer.
        x: Its input, in which tensors with rows of samples are ``(B, k, ...)``.
        dA: ``(B, k, ...)``.
        undisturbed: Makes the context in which to form gradients.
    """
    if rule.adds_up_positions or (isinstance(x, Call) and x.is_shared):
        return condense(rule, x, dA, undisturbed)
    rows = dA.shape[:2]
    if isinstance(x, Call) and x.random_state is not None and rows[1] > 1:
        raise RuntimeError(
            f"{type(rule.module).__name__} draws random numbers and was given several rows of each sample, so which "
            "were drawn for which cannot be told: set its dropout to zero and put an nn.Dropout before or behind it"
        )

    def row(j: int) -> tuple[Any, Tensor]:
        def of(leaf: Any) -> Any:
            return leaf[:, j] if isinstance(leaf, Tensor) and leaf.shape[:2] == rows else leaf

        if isinstance(x, Tensor) and x.shape[:2] != rows:
            raise RuntimeError(
                f"{type(rule.module).__name__} does not return a row for each row of its input, so its per-sample "
                "gradients cannot be told apart: give it a first dimension for the samples"
            )
        if isinstance(x, Call):
            args, kwargs, output = tree_map(of, (x.args, dict(x.kwargs), x.output))
            return x._replace(args=args, kwargs=kwargs, output=output, has_rows=False), dA[:, j]
        return tree_map(of, x), dA[:, j]

    if rows[1] == 1:
        return condense(rule, *row(0), undisturbed)
    with undisturbed():
        total = Formed.of(rule, *row(0))
        for j in range(1, rows[1]):  # one at a time: they are as large as the parameters of the layer for each sample
            total = Formed.added([total, Formed.of(rule, *row(j))])
        return total


def _check_complete(rule: Rule[Any], forgotten: Sequence[str]) -> None:
    """Raises ``RuntimeError`` if a rule left out a trained parameter, which would get noise and never learn."""
    if forgotten:
        raise RuntimeError(
            f"the rule of {type(rule.module).__name__} gives no gradient of {list(forgotten)}, which are being "
            "trained: let it return them, or freeze them"
        )
