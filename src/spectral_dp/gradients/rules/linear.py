"""The rule of dense layers, whose gradients have rank one: ``g_b = dA_b (x) x_b``, summed over tokens if there are any.

    x   (B, ..., n)   dA  (B, ..., m)   g_b  (m, n)
    ||g_b||² = ||dA_b||² ||x_b||² without tokens (the "ghost norm"); with tokens see ``token_norms``.

With an input layout ``(C, H, W)``, the input is a flattened image. The *input* is transformed over ``(H, W)`` and only
its lowest coordinates are kept: ``z_b = dA_b (x) (T x_b)_kept``. This is exact, because the transform acts on the input
axis only, and cheaper than the dense gradient, because the kept input is narrower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from spectral_dp.gradients.norms import token_norms, transform_error
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import register_rule_by_name
from spectral_dp.gradients.rules.rule import WeightAndBiasRule
from spectral_dp.gradients.sums import as_tokens, merge_tokens, weigh


class LinearRule(WeightAndBiasRule[nn.Linear]):
    """The rule of ``nn.Linear``. Its ``weight`` coefficients are ``(m, n)``, or ``(m, C, M)`` with an input layout."""

    def __init__(self, module: nn.Linear, config: LayerConfig) -> None:
        layout = config.input_layout
        if layout is not None and (not 1 <= len(layout) <= 3 or math.prod(layout) != module.in_features):
            raise ValueError(
                f"input layout {layout} does not describe the {module.in_features} inputs of the layer: give "
                f"(L,), (C, L) or (C, H, W) with product {module.in_features}"
            )
        self._layout = layout if layout is None or len(layout) > 1 else (1, *layout)
        super().__init__(module, config)

    @property
    def adds_up_positions(self) -> bool:
        return True

    def coordinate_shape(self) -> tuple[int, ...] | None:
        return None if self._layout is None else self._layout[1:]

    def leading_shape(self) -> tuple[int, ...]:
        return () if self._layout is None else (self.module.out_features, self._layout[0])

    def forms(self, x: Tensor, dA: Tensor) -> bool:
        return not self.trains("weight")  # a bias alone is smaller than dA

    def merge(self, uses: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return merge_tokens(uses)

    def weight_norms(self, x: Tensor, dA: Tensor) -> Tensor:
        x = self.positions(x)
        return token_norms(self._inputs(x, counted=True), self.positions(dA), self._input_errors(x))

    def weight_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> Tensor:
        left, right = weigh(self._inputs(self.positions(x)), self.positions(dA), c)
        return (right.flatten(0, 1).T @ left.flatten(0, 1)).view(self.coefficient_shape("weight"))

    def form_weight(self, x: Tensor, dA: Tensor) -> Tensor:
        return self.positions(dA).mT @ self._inputs(self.positions(x), counted=True)

    def positions(self, dA: Tensor) -> Tensor:
        dtype = self.dtype
        return as_tokens(dA if dA.dtype == dtype else dA.to(dtype))

    def _inputs(self, x: Tensor, *, counted: bool = False) -> Tensor:
        """Returns the input as the gradient uses it: ``(B, T, n)``, or its filtered spectrum ``(B, T, C * M)``."""
        if self.projection is None or self._layout is None:
            return x
        return self.projection.analyse(x.view(x.shape[:-1] + self._layout), counted=counted).flatten(-2)

    def _input_errors(self, x: Tensor) -> Tensor | None:
        """Returns bounds ``(B, T)`` on how far the filtered inputs of norm and sum differ; None without a filter."""
        if self.gains is None or self._layout is None:
            return None
        largest = max(float(self.gains.pre.max()), 1.0)
        return transform_error(self.gains.pre.numel(), x.dtype) * largest * torch.linalg.vector_norm(x, dim=2)


@register_rule_by_name(r"transformers\.pytorch_utils\.Conv1D", parameters=["weight", "bias"])
class TransposedLinearRule(LinearRule):
    """Rule of the ``Conv1D`` of GPT-2, a dense layer whose weight is stored as ``(n, m)``."""

    def __init__(self, module: nn.Module, config: LayerConfig) -> None:
        if config.input_layout is not None:
            raise ValueError("an input layout is for nn.Linear: leave it out for this layer")
        super().__init__(cast(nn.Linear, module), config)

    def weight_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> Tensor:
        left, right = weigh(self.positions(x), self.positions(dA), c)
        return left.flatten(0, 1).T @ right.flatten(0, 1)

    def form_weight(self, x: Tensor, dA: Tensor) -> Tensor:
        return super().form_weight(x, dA).mT
