"""The rule of embeddings that are filtered over their rows: tables whose rows have an order, such as positions.

x  (B, ...) token numbers   dA  (B, ..., E)   T  (M, V) counted basis vectors over the rows
z_b = sum_t dA_bt (x) T[:, x_bt], (E, M): nothing of the size of the table is made per sample
"""

from __future__ import annotations

from torch import Tensor, nn

from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.rule import Rule
from spectral_dp.gradients.sums import as_tokens


class FilteredEmbeddingRule(Rule[nn.Embedding]):
    """The rule of an ``nn.Embedding`` with a filter. Its ``weight`` coefficients are ``(E, M)``."""

    def __init__(self, module: nn.Embedding, config: LayerConfig) -> None:
        if module.padding_idx is not None:
            raise ValueError(
                "padding_idx keeps a row as it is, but what is filtered over the rows changes all of them: leave "
                "padding_idx out for a table of positions, or the filter"
            )
        super().__init__(module, config)

    def coordinate_shape(self) -> tuple[int, ...]:
        return (self.module.num_embeddings,)

    def leading_shape(self) -> tuple[int, ...]:
        return (self.module.embedding_dim,)

    def form(self, x: Tensor, dA: Tensor) -> dict[str, Tensor]:
        x, dA = as_tokens(x[..., None]).squeeze(-1), as_tokens(dA.to(self.dtype))
        matrix = self.matrix(dA, counted=True)
        if not self.trains("weight") or matrix is None:
            return {}
        return {"weight": dA.mT @ matrix.T[x]}  # (B, E, T) (B, T, M)

    def gradient(self, name: str, coefficients: Tensor) -> Tensor:
        assert self.projection is not None
        return self.projection.synthesise(coefficients).mT
