"""Several uses of the same parameters as one use, whose norm is that of the sum of their gradients.

A sample that meets a parameter in several places must be clipped by the norm of the *sum* of what it did there. The
general way is to form the gradients of each use and to add them up (:meth:`Formed.added`), which takes the memory of
the parameters for each sample. Here are the cases in which algebra avoids that:

* several uses of one layer whose rule can express them as one, such as more tokens of a dense layer;
* several lookups in one table of embeddings, also by several layers;
* a table that is also the weight of the output layer (:class:`Tied`), as in most language models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from spectral_dp.gradients.norms import gram_matrices, rounded_up, squares
from spectral_dp.gradients.rules.embedding import EmbeddingRule
from spectral_dp.gradients.rules.linear import LinearRule
from spectral_dp.gradients.rules.rule import Rule
from spectral_dp.gradients.sums import as_tokens
from spectral_dp.gradients.uses import Formed, Recorded, Rows, Use, condense


@dataclass(frozen=True, eq=False)
class Tied:
    """The use of a table of embeddings that is also the weight of a dense layer, ``(V, E)``.

    A sample looks up rows ``x_t``, whose gradients are ``dE_t``, and its outputs ``h_s`` are multiplied by the table,
    with the gradients ``dY_s``. Its gradient is ``sum_t 1[x_t] dE_t^T + sum_s dY_s h_s^T``. The squared norm is that of
    the two parts and twice their inner product, ``sum_ts dY_s[x_t] <dE_t, h_s>``: no table is formed for a sample.

    Attributes:
        lookups: The use of the embedding.
        output: The use of the dense layer.
    """

    lookups: Recorded
    output: Recorded

    @property
    def rules(self) -> tuple[Rule[nn.Module], ...]:
        """The rules of the two layers."""
        return (self.lookups.rule, self.output.rule)

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.output.size

    @property
    def precision(self) -> float:
        """The machine epsilon of the coarser of the two gradients."""
        return max(self.lookups.precision, self.output.precision)

    def squared_norms(self) -> Tensor:
        """Returns ``||z_b||²``, ``(B,)``, rounded up as all terms of one sum."""
        dtype = self.output.rule.dtype
        embedding = cast(EmbeddingRule, self.lookups.rule)
        x, dE = embedding.positions(self.lookups.x, self.lookups.dA)
        h, dY = as_tokens(self.output.x.to(dtype)), as_tokens(self.output.dA.to(dtype))
        inner = gram_matrices(h, dE)
        met = dY.gather(2, x[:, None].expand(-1, h.shape[1], -1))
        total = self.lookups.squared_norms() + self.output.squared_norms() + 2 * (met * inner).double().sum((1, 2))
        dE_lengths, h_lengths, dY_lengths = (squares(t).sum(2).sqrt() for t in (dE, h, dY))
        return rounded_up(
            total,
            torch.cat([torch.ones_like(dE_lengths), h_lengths], dim=1),
            torch.cat([dE_lengths, dY_lengths], dim=1),
            h.shape[2],
            max(dY.shape[2], dE.shape[2]),
            from_gram=True,
        )

    def clipped_sums(self, c: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns ``sum_b c_b z_b`` of every trained parameter."""
        sums = self.output.clipped_sums(c)
        for parameter, total in self.lookups.clipped_sums(c).items():
            sums[parameter] = sums[parameter] + total
        return sums

    def select(self, rows: Rows) -> Tied:
        """Returns the use of some of the samples."""
        return Tied(self.lookups.select(rows), self.output.select(rows))

    def formed(self) -> Formed:
        """Returns the same use with its per-sample gradients formed."""
        return Formed.added([self.lookups, self.output])


AnyUse = Use | Tied


def merged(uses: Sequence[Use]) -> Sequence[AnyUse]:
    """Merges several uses, of one layer or of layers that share parameters, into one if that takes no more memory.

    This is so for gradients that are formed already, and in the cases that the module names. Other uses are returned
    unchanged; see :meth:`Formed.added`.
    """
    if len(uses) < 2:
        return uses
    recorded = [use for use in uses if isinstance(use, Recorded)]
    if not recorded:
        return [Formed.added(uses)]
    if len(recorded) < len(uses):
        return uses
    by_rule: dict[Rule[nn.Module], list[Recorded]] = {}
    for use in recorded:
        by_rule.setdefault(use.rule, []).append(use)
    each: list[Use] = []
    for group in by_rule.values():
        if (one := _as_one(group)) is None:
            return uses
        each.append(one)
    return each if len(each) == 1 else _tied(each)


def _as_one(uses: Sequence[Recorded]) -> Use | None:
    """Several uses of one layer as one, or None if its rule cannot."""
    if len(uses) == 1:
        return uses[0]
    one = uses[0].rule.merge([(use.x, use.dA) for use in uses])
    return None if one is None else condense(uses[0].rule, *one)


def _tied(uses: Sequence[Use]) -> Sequence[AnyUse]:
    """The uses of several layers that share a table of embeddings as one, if that is what they are."""
    lookups = [use for use in uses if isinstance(use, Recorded) and type(use.rule) is EmbeddingRule]
    others = [use for use in uses if use not in lookups]
    if not lookups or len({(use.rule.module.weight, use.rule.module.padding_idx) for use in lookups}) > 1:
        return uses
    lookup = _as_one([Recorded(lookups[0].rule, use.x, use.dA) for use in lookups])
    if not isinstance(lookup, Recorded):
        return uses
    if not others:
        return [lookup]
    output, *more = others
    if more or not isinstance(output, Recorded) or type(output.rule) is not LinearRule or output.rule.gains is not None:
        return uses
    is_tied = output.rule.module.weight is lookup.rule.module.weight
    return [Tied(lookup, output)] if is_tied else uses
