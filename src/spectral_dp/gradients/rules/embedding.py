"""The rule of embeddings. The gradient of a sample is zero except in the rows of its tokens.

    x  (B, ...) token numbers   dA  (B, ..., E)   g_b  (V, E), row v = sum of dA over the positions where x_b = v

If a sample contains a token several times, the gradients are added before the norm is computed. Norms and sums do not
need a table for each sample.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectral_dp.gradients.norms import rounded_up
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import register_rule
from spectral_dp.gradients.rules.rule import GhostRule
from spectral_dp.gradients.sums import as_tokens, scale


@register_rule(nn.Embedding, parameters=["weight"])
class EmbeddingRule(GhostRule[nn.Embedding]):
    """The rule of ``nn.Embedding``. Its ``weight`` coefficients are the table's gradient ``(V, E)``, not filtered."""

    def __init__(self, module: nn.Embedding, config: LayerConfig) -> None:
        if module.scale_grad_by_freq:
            raise ValueError("scale_grad_by_freq weighs gradients by what other samples hold: set it to False")
        if module.max_norm is not None:
            raise ValueError("max_norm rewrites the table in the forward pass, outside the mechanism: set it to None")
        super().__init__(module, config)

    def squared_norms(self, x: Tensor, dA: Tensor) -> Tensor:
        if not self.trains("weight") or x.numel() == 0:
            return dA.new_zeros(len(dA), dtype=torch.float64)
        x, dA = self._positions(x, dA)
        vocabulary = self.module.num_embeddings
        sample = torch.arange(len(x), device=x.device)[:, None]
        pairs, position = torch.unique(sample * vocabulary + x, return_inverse=True)
        rows = dA.new_zeros(len(pairs), dA.shape[-1]).index_add_(0, position.flatten(), dA.flatten(0, 1))
        total = dA.new_zeros(len(dA)).index_add_(0, pairs // vocabulary, rows.square().sum(1))
        lengths = dA.square().sum(2).sqrt()
        return rounded_up(total, torch.ones_like(lengths), lengths, 1, dA.shape[-1], from_gram=False)

    def clipped_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        if not self.trains("weight"):
            return {}
        x, dA = self._positions(x, dA)
        table = torch.zeros_like(self.module.weight, dtype=self.dtype, requires_grad=False)
        return {"weight": table.index_add_(0, x.flatten(), scale(dA, c).flatten(0, 1))}

    def form(self, x: Tensor, dA: Tensor) -> dict[str, Tensor]:
        if not self.trains("weight"):
            return {}
        x, dA = self._positions(x, dA)
        tables = dA.new_zeros(len(x), *self.module.weight.shape)
        return {"weight": tables.scatter_add_(1, x[..., None].expand_as(dA), dA)}

    def _positions(self, x: Tensor, dA: Tensor) -> tuple[Tensor, Tensor]:
        x, dA = as_tokens(x[..., None]).squeeze(-1), as_tokens(dA.to(self.dtype))
        if self.module.padding_idx is not None:  # its row is not trained
            dA = dA.masked_fill((x == self.module.padding_idx)[..., None], 0)
        return x, dA
