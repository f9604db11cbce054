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

from spectral_dp.gradients.norms import bias_norms, token_norms, transform_error
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import register_rule_by_name
from spectral_dp.gradients.rules.rule import GhostRule
from spectral_dp.gradients.sums import as_tokens, merge_tokens, over_tokens, weigh


class LinearRule(GhostRule[nn.Linear]):
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

    def needs_input(self) -> bool:
        return self.trains("weight")

    def forms(self, x: Tensor, dA: Tensor) -> bool:
        return not self.trains("weight")  # a bias alone is smaller than dA

    def merge(self, uses: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return merge_tokens(uses)

    def squared_norms(self, x: Tensor, dA: Tensor) -> Tensor:
        x, dA = self._tokens(x, dA)
        total = dA.new_zeros(len(dA), dtype=torch.float64)
        if self.trains("weight"):
            total = total + token_norms(self._inputs(x, counted=True), dA, self._input_errors(x))
        if self.trains("bias"):
            total = total + bias_norms(dA)
        return total

    def clipped_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        x, dA = self._tokens(x, dA)
        sums = {}
        if self.trains("weight"):
            left, right = weigh(self._inputs(x), dA, c)
            total = right.flatten(0, 1).T @ left.flatten(0, 1)
            sums["weight"] = total.view(self.coefficient_shape("weight"))
        if self.trains("bias"):
            sums["bias"] = c.to(dA.dtype) @ over_tokens(dA)
        return sums

    def form(self, x: Tensor, dA: Tensor) -> dict[str, Tensor]:
        x, dA = self._tokens(x, dA)
        out = {}
        if self.trains("weight"):
            out["weight"] = dA.mT @ self._inputs(x, counted=True)
        if self.trains("bias"):
            out["bias"] = over_tokens(dA)
        return out

    def _tokens(self, x: Tensor, dA: Tensor) -> tuple[Tensor, Tensor]:
        dtype = self.dtype
        return as_tokens(x.to(dtype)), as_tokens(dA.to(dtype))

    def _inputs(self, x: Tensor, *, counted: bool = False) -> Tensor:
        """Returns the input as the gradient uses it: ``(B, T, n)``, or its filtered spectrum ``(B, T, C * M)``."""
        if self.projection is None or self._layout is None:
            return x
        return self.projection.analyse(x.unflatten(-1, self._layout), counted=counted).flatten(-2)

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

    def clipped_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        x, dA = self._tokens(x, dA)
        sums = {}
        if self.trains("weight"):
            left, right = weigh(x, dA, c)
            sums["weight"] = left.flatten(0, 1).T @ right.flatten(0, 1)
        if self.trains("bias"):
            sums["bias"] = c.to(dA.dtype) @ over_tokens(dA)
        return sums

    def form(self, x: Tensor, dA: Tensor) -> dict[str, Tensor]:
        out = super().form(x, dA)
        return out | {name: z.mT for name, z in out.items() if name == "weight"}
