"""The rule of dense layers whose input is expressed in a public basis (a *prior*), and the choice between both rules.

    U  (n, k)  orthonormal, public        s  (k,)  pre-gains        t  (k,)  post-gains
    y_b = s * U^t x_b                     z_b = dA_b (x) y_b        ||z_b|| = |dA_b| |y_b|
    G   = S diag(t) U^t                   from the released sum S = sum_b c_b z_b + noise

As the gradient of a dense layer, ``z_b`` has rank one and is never formed. It is ``k`` wide, not ``n``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spectral_dp.gradients.precision import full_precision
from spectral_dp.gradients.recording.call import Call
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.linear import LinearRule
from spectral_dp.gradients.rules.registry import register_rule


class LinearInBasisRule(LinearRule):
    """The rule of ``nn.Linear`` with an input basis. Its ``weight`` coefficients are ``(m, k)``.

    Formal guarantee. When the backward pass reaches the layer, its input is replaced by the coordinates ``y_b``. Norm
    and clipped sum are computed from the same coordinates. So no property of the basis, and no rounding error of the
    product with it, can make a norm too small for its sum.
    """

    takes_input_basis = True

    def __init__(self, module: nn.Linear, config: LayerConfig) -> None:
        assert config.input_basis is not None
        self._basis = config.input_basis
        if self._basis.width != module.in_features:
            raise ValueError(
                f"the basis is for {self._basis.width} inputs, but the layer has {module.in_features}: compute the "
                "spectrum of the input of this layer"
            )
        super().__init__(module, config)

    def begin_step(self, step: int) -> None:
        # Even without a filter: the basis itself is one, unless it spans everything.
        self._filter_by(self.config.filter.gains(self._basis, (self._basis.rank,), step))

    def coordinate_shape(self) -> tuple[int, ...]:
        return (self._basis.rank,)

    def leading_shape(self) -> tuple[int, ...]:
        return (self.module.out_features,)

    def input_of(self, call: Call) -> Tensor:
        x: Tensor = super().input_of(call)
        return self.coordinates(x) if self.trains("weight") else x

    def coordinates(self, x: Tensor) -> Tensor:
        """Returns ``y``, with all coordinates that count in the norm: ``(B, ..., n) -> (B, ..., k)``."""
        assert self.projection is not None
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), full_precision():
            return self.projection.analyse(x.detach().to(self.dtype), counted=True)

    def _inputs(self, x: Tensor, *, counted: bool = False) -> Tensor:
        """Returns the coordinates ``x`` as the gradient uses them: those that count, or of them those that are kept."""
        assert self.projection is not None
        return x if counted else self.projection.kept_of_counted(x)

    def _input_errors(self, x: Tensor) -> None:
        """Returns None: norm and sum use the same numbers."""
        return None


@register_rule(nn.Linear, parameters=["weight", "bias"])
def linear_rule(module: nn.Linear, config: LayerConfig) -> LinearRule:
    """Returns the rule of a dense layer: in a public basis if the configuration has one."""
    return LinearRule(module, config) if config.input_basis is None else LinearInBasisRule(module, config)
