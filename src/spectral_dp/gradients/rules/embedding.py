"""The rule of embeddings. The gradient of a sample is zero except in the rows of its tokens.

    x  (B, ...) token numbers   dA  (B, ..., E)   g_b  (V, E), row v = sum of dA over the positions where x_b = v

If a sample contains a token several times, the gradients are added before the norm is computed. Norms and sums do not
need a table for each sample. An ``nn.EmbeddingBag`` adds up rows, ``y_b = sum_l w_bl E[x_bl]``: each of them gets
``w_bl dA_b``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from spectral_dp.gradients.norms import rounded_up
from spectral_dp.gradients.recording.call import Call
from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.gradients.rules.filtered_embedding import FilteredEmbeddingRule
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import register_rule
from spectral_dp.gradients.rules.rule import GhostRule
from spectral_dp.gradients.sums import as_tokens, merge_tokens, scale
from spectral_dp.mechanism.filters import IdentityFilter


class EmbeddingRule(GhostRule[nn.Embedding | nn.EmbeddingBag]):
    """The rule of ``nn.Embedding``. Its ``weight`` coefficients are the table's gradient ``(V, E)``, not filtered."""

    def __init__(self, module: nn.Embedding | nn.EmbeddingBag, config: LayerConfig) -> None:
        _check_table(module)
        super().__init__(module, config)

    @property
    def adds_up_positions(self) -> bool:
        return True

    def merge(self, uses: Sequence[tuple[Any, Tensor]]) -> tuple[Any, Tensor] | None:
        x, dA = merge_tokens([(x[..., None], dA) for x, dA in uses])
        return x.squeeze(-1), dA

    def squared_norms(self, x: Any, dA: Tensor) -> Tensor:
        samples = len(dA)
        x, dA = self.positions(x, dA)
        if not self.trains("weight") or x.numel() == 0:
            return dA.new_zeros(samples, dtype=torch.float64)
        vocabulary = self.module.num_embeddings
        sample = torch.arange(len(x), device=x.device)[:, None]
        pairs, position = torch.unique(sample * vocabulary + x, return_inverse=True)
        rows = dA.new_zeros(len(pairs), dA.shape[-1]).index_add_(0, position.flatten(), dA.flatten(0, 1))
        total = dA.new_zeros(len(dA)).index_add_(0, pairs // vocabulary, rows.square().sum(1))
        lengths = dA.square().sum(2).sqrt()
        return rounded_up(total, torch.ones_like(lengths), lengths, 1, dA.shape[-1], from_gram=False)

    def clipped_sum(self, x: Any, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        if not self.trains("weight"):
            return {}
        x, dA = self.positions(x, dA)
        table = torch.zeros_like(self.module.weight, dtype=self.dtype, requires_grad=False)
        return {"weight": table.index_add_(0, x.flatten(), scale(dA, c).flatten(0, 1))}

    def form(self, x: Any, dA: Tensor) -> dict[str, Tensor]:
        if not self.trains("weight"):
            return {}
        x, dA = self.positions(x, dA)
        tables = dA.new_zeros(len(x), *self.module.weight.shape)
        return {"weight": tables.scatter_add_(1, x[..., None].expand_as(dA), dA)}

    def positions(self, x: Any, dA: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens ``(B, T)`` and the gradient of the row that each looked up, ``(B, T, E)``."""
        x, dA = as_tokens(x[..., None]).squeeze(-1), as_tokens(dA.to(self.dtype))
        if self.module.padding_idx is not None:  # its row is not trained
            dA = dA.masked_fill((x == self.module.padding_idx)[..., None], 0)
        return x, dA


@register_rule(nn.Embedding, parameters=["weight"])
def embedding_rule(module: nn.Embedding, config: LayerConfig) -> EmbeddingRule | FilteredEmbeddingRule:
    """The rule of an embedding, filtered over its rows or not."""
    _check_table(module)
    return (EmbeddingRule if isinstance(config.filter, IdentityFilter) else FilteredEmbeddingRule)(module, config)


def _check_table(module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.scale_grad_by_freq:
        raise ValueError("scale_grad_by_freq weighs gradients by what other samples hold: set it to False")
    if module.max_norm is not None:
        raise ValueError("max_norm rewrites the table in the forward pass, outside the mechanism: set it to None")


class Bags(NamedTuple):
    """Tokens ``(B, L)`` of the bags, and how much each counts; zero for what fills a bag up to the longest."""

    tokens: Tensor
    weights: Tensor


class EmbeddingBagRule(EmbeddingRule):
    """Rule of ``nn.EmbeddingBag`` with ``mode="sum"`` or ``"mean"``; a bag is a sample."""

    @property
    def adds_up_positions(self) -> bool:
        return False  # one gradient for a whole bag

    def merge(self, uses: Sequence[tuple[Any, Tensor]]) -> None:
        return None

    def input_of(self, call: Call) -> Bags:
        names = ("input", "offsets", "per_sample_weights")
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        tokens, offsets, weights = (given.get(name) for name in names)
        assert tokens is not None
        counts = torch.ones_like(tokens, dtype=self.dtype) if weights is None else weights.to(self.dtype)
        if offsets is not None and call.has_rows:
            raise RuntimeError(
                "EmbeddingBag was given several bags of each sample, or bags that samples share, by offsets, so their "
                "gradients cannot be told apart: give it tokens (bags, length) without offsets"
            )
        if offsets is not None:
            ends = offsets[1:] if self.module.include_last_offset else F.pad(offsets[1:], (0, 1), value=len(tokens))
            sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
            tokens, counts = (_padded(t, sizes) for t in (tokens, counts))
        if self.module.padding_idx is not None:  # neither added up nor counted
            counts = counts.masked_fill(tokens == self.module.padding_idx, 0)
        if self.module.mode == "mean":
            counts = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        return Bags(tokens, counts)

    def positions(self, x: Bags, dA: Tensor) -> tuple[Tensor, Tensor]:
        return x.tokens, x.weights[..., None] * dA.to(self.dtype)[:, None]


def _padded(t: Tensor, sizes: list[int]) -> Tensor:
    """Bags that lie one after the other, ``(B, L)``, filled up with zeros."""
    return pad_sequence(list(t[: sum(sizes)].split(sizes)), batch_first=True) if sizes else t.view(0, -1)


@register_rule(nn.EmbeddingBag, parameters=["weight"])
def embedding_bag_rule(module: nn.EmbeddingBag, config: LayerConfig) -> EmbeddingBagRule | FallbackRule:
    """The rule of an embedding bag that adds up; the fallback for one that takes the maximum."""
    return (FallbackRule if module.mode == "max" else EmbeddingBagRule)(module, config)
