"""The base classes of rules. A rule computes the per-sample gradients of one kind of layer.

Letters, here and in every rule:

    B   samples            x   (B, ...) input of the layer, as recorded
    M   kept coordinates   dA  (B, ...) gradient of the loss with respect to the layer's output
    c   (B,) weight of each sample, the clipping factors

The per-sample gradient ``g_b`` of a layer is never released. What is released, with noise, is ``sum_b c_b z_b`` with
``z_b = a * (T g_b)`` (``mechanism/projection.py``). The ``c_b`` are computed from squared norms ``||z_b||²``. Weight
and bias of a layer are one block: their squared norms are added.

Every rule can form the ``z_b``. A :class:`GhostRule` can also compute norm and sum without them. ``uses.py`` decides
which of the two is done. A rule is registered with ``register_rule``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from spectral_dp.gradients.norms import bias_norms
from spectral_dp.gradients.recording.call import Call
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.sums import over_tokens
from spectral_dp.mechanism.filters import IdentityFilter
from spectral_dp.mechanism.gains import Gains
from spectral_dp.mechanism.projection import Projection
from spectral_dp.mechanism.transforms import Transform, TransformName, get_transform

Module = TypeVar("Module", bound=nn.Module)


class Rule(ABC, Generic[Module]):
    """Forms the per-sample gradients of one layer in filtered spectral coordinates. A subclass defines :meth:`form`.

    Formal guarantee. No sample adds more to the clipped sum than its bound, whatever :meth:`form` computes:

    * Norm and sum are computed from the same numbers, so rounding and underflow do not matter.
    * A sample that is left out is removed from these numbers, and not from the inputs of :meth:`form`, so a function
      that is not finite at zero does not matter either.

    From the backward pass of the layer until the clipped sum, ``B`` times the number of parameters are kept in memory,
    in place of ``x`` and ``dA``.

    Attributes:
        module: The layer.
        config: What is released of the layer.
        transform: The transform of its coordinates.
        projection: The transform with the gains of the current step, or None if nothing is filtered. Then nothing is
            transformed either, because without a filter an orthonormal transform changes nothing.
    """

    #: The transform that is used if the :class:`LayerConfig` names none.
    default_transform: ClassVar[TransformName] = "dct"

    #: Whether the rule covers the parameters of the module's parts too. Calls of the parts are then not recorded.
    covers_parts: ClassVar[bool] = False

    #: Whether the module's output is recorded with its input, and the generators as its forward pass found them.
    needs_output: ClassVar[bool] = False

    #: Whether the rule can express the layer's input in a public basis.
    takes_input_basis: ClassVar[bool] = False

    def __init__(self, module: Module, config: LayerConfig) -> None:
        if config.input_basis is not None and not self.takes_input_basis:
            raise ValueError(f"an input basis is for nn.Linear: leave it out for this {type(module).__name__}")
        self.module = module
        self.config = config
        self.transform: Transform = get_transform(config.input_basis or config.transform or self.default_transform)
        self.projection: Projection | None = None
        self.begin_step(0)

    @abstractmethod
    def form(self, x: Any, dA: Tensor) -> dict[str, Tensor]:
        """Returns the per-sample gradients ``(B, ...)`` of each trained parameter, by name, in any memory order.

        For a filtered weight these are the coordinates that count in the clipped norm, in the last dimension:
        ``(B, ..., M)``. In the paper's order (clip, then filter) some of them are dropped afterwards.

        Args:
            x: What :meth:`input_of` returned, usually the input of the layer.
            dA: The gradient of the loss with respect to the output of the layer.
        """

    def begin_step(self, step: int) -> None:
        """Fixes the gains of a step before the step reads any data."""
        filter, shape = self.config.filter, self.coordinate_shape()
        if isinstance(filter, IdentityFilter):
            return
        if shape is None:
            raise ValueError(
                f"{type(self.module).__name__} has no spectrum to filter, but was given {filter!r}: leave the filter "
                "out for this layer, or give the input_layout of a dense layer fed by an image or a sequence, or the "
                "input_basis of any dense layer"
            )
        self._filter_by(filter.gains(self.transform, shape, step))

    def _filter_by(self, gains: Gains) -> None:
        if gains is not self.gains:  # otherwise its matrices are still valid
            self.projection = Projection(self.transform, gains)

    @property
    def gains(self) -> Gains | None:
        """The gains of the current step, or None if nothing is filtered."""
        return None if self.projection is None else self.projection.gains

    def matrix(self, like: Tensor, *, counted: bool = False) -> Tensor | None:
        """Returns :meth:`Projection.matrix`, ``(M, N)``, or None if nothing is filtered."""
        return None if self.projection is None else self.projection.matrix(like, counted=counted)

    def input_of(self, call: Call) -> Any:
        """Returns the ``x`` of a call of the layer: by default, its first argument."""
        return call.args[0] if call.args else next(iter(call.kwargs.values()))

    def needs_input(self) -> bool:
        """Returns whether the gradients of what is trained depend on ``x``; if not, ``x`` has a shape and no numbers.

        A bias alone (BitFit) has the gradient ``dA``: then nothing is held that plain PyTorch does not hold.
        """
        return True

    @property
    def adds_up_positions(self) -> bool:
        """Whether dimensions between the first and the features are positions, whose gradients the rule adds up.

        Then several rows of a sample can be given as further positions: ``x`` and ``dA`` as ``(B, k, ...)``.
        """
        return False

    def coordinate_shape(self) -> tuple[int, ...] | None:
        """Returns the shape over which the weight is transformed and filtered, or None if it has no such shape."""
        return None

    def leading_shape(self) -> tuple[int, ...]:
        """Returns the dimensions of the weight that are not transformed."""
        shape = self.coordinate_shape()
        return tuple(self.parameter("weight").shape[: -len(shape)]) if shape else ()

    def coefficient_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a parameter's coefficients in a clipped sum. It does not depend on the data."""
        if name == "weight" and self.gains is not None:
            return (*self.leading_shape(), self.gains.count)
        return tuple(self.parameter(name).shape)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that the rule covers: the module's own, or those of its parts too, each once."""
        if self.covers_parts:
            return dict(self.module.named_parameters())
        found: dict[str, nn.Parameter] = {}
        seen: set[int] = set()  # by identity: tensors are slow to hash
        for name, parameter in self.module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[name] = parameter
        return found

    def parameter(self, name: str) -> nn.Parameter:
        """Returns the parameter with this name."""
        return self.parameters()[name]

    def trained(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that are being trained, by name."""
        return {name: parameter for name, parameter in self.parameters().items() if parameter.requires_grad}

    def trains(self, name: str) -> bool:
        """Returns whether the layer has a parameter of this name that is being trained."""
        parameter = self.module._parameters.get(name)
        return parameter is not None and parameter.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all computations: at least float32, also under autocast and for half-precision models."""
        # Asked for many times in a step, so not by way of all parameters.
        first = next((p for p in self.module._parameters.values() if p is not None), None)
        own = next(self.module.parameters()).dtype if first is None else first.dtype
        return own if own == torch.float32 else torch.promote_types(own, torch.float32)

    def released(self, name: str, total: Tensor) -> Tensor:
        """Returns the released coordinates, in :meth:`coefficient_shape`, of a sum of what :meth:`form` returned."""
        if name == "weight" and self.projection is not None:
            total = self.projection.kept_of_counted(total)
        return total.reshape(self.coefficient_shape(name))

    def gradient(self, name: str, coefficients: Tensor) -> Tensor:
        """Returns the gradient for coefficients of a parameter, by post-gain and inverse transform."""
        if name == "weight" and self.projection is not None:
            coefficients = self.projection.synthesise(coefficients)
        return coefficients.reshape(self.parameter(name).shape)


class GhostRule(Rule[Module]):
    """Computes norms and clipped sums of one layer without forming its per-sample gradients.

    Formal guarantee, which each subclass must keep:

    * What a sample adds to :meth:`clipped_sum`, divided by its weight, is not longer than its norm in
      :meth:`squared_norms`, up to the clip's rounding guard. The two are computed in different ways and their rounding
      errors differ, so norms must be rounded up (``norms.py``).
    * Both equal those of a loop over samples, up to rounding. They are not approximations.

    Samples whose gradients are not finite are left out and are not passed to :meth:`clipped_sum`. Gradients are still
    formed if :meth:`forms` says so, and if a parameter is used more than once, because its gradients must be added
    before the norm is computed.
    """

    def forms(self, x: Any, dA: Tensor) -> bool:
        """Returns whether to form the per-sample gradients of a use, because that is cheaper for these shapes."""
        return False

    @abstractmethod
    def squared_norms(self, x: Any, dA: Tensor) -> Tensor:
        """Returns ``||z_b||²``, ``(B,)``, over all trained parameters of the layer."""

    @abstractmethod
    def clipped_sum(self, x: Any, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Returns ``sum_b c_b z_b`` of each trained parameter by name, with the kept coordinates last: ``(..., M)``."""

    def merge(self, uses: Sequence[tuple[Any, Tensor]]) -> tuple[Any, Tensor] | None:
        """Returns one use ``(x, dA)`` whose gradient is the sum over several uses, or None if there is none."""
        return None


class WeightAndBiasRule(GhostRule[Module]):
    """A ghost rule of a layer that adds a bias to its output at every position, such as dense layers and convolutions.

    A subclass defines norm, sum and form of the ``weight``. Those of the bias are the same for all of them: its
    per-sample gradient is the sum of ``dA`` over positions.
    """

    def needs_input(self) -> bool:
        return self.trains("weight")

    def squared_norms(self, x: Any, dA: Tensor) -> Tensor:
        bias = bias_norms(self.positions(dA)) if self.trains("bias") else None
        if not (self.trains("weight") and dA.shape[0]):
            return dA.new_zeros(dA.shape[0], dtype=torch.float64) if bias is None else bias
        weight = self.weight_norms(x, dA)
        return weight if bias is None else weight + bias

    def clipped_sum(self, x: Any, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        sums = {}
        if self.trains("weight"):
            sums["weight"] = self.weight_sum(x, dA, c)
        if self.trains("bias"):
            biases = over_tokens(self.positions(dA))
            sums["bias"] = c.to(biases.dtype) @ biases
        return sums

    def form(self, x: Any, dA: Tensor) -> dict[str, Tensor]:
        out = {}
        if self.trains("weight"):
            out["weight"] = self.form_weight(x, dA)
        if self.trains("bias"):
            out["bias"] = over_tokens(self.positions(dA))
        return out

    @abstractmethod
    def weight_norms(self, x: Any, dA: Tensor) -> Tensor:
        """Returns ``||z_b||²`` of the weight, ``(B,)``; there is at least one sample."""

    @abstractmethod
    def weight_sum(self, x: Any, dA: Tensor, c: Tensor) -> Tensor:
        """Returns ``sum_b c_b z_b`` of the weight, with the kept coordinates last."""

    @abstractmethod
    def form_weight(self, x: Any, dA: Tensor) -> Tensor:
        """Returns the ``z_b`` of the weight, ``(B, ...)``."""

    def positions(self, dA: Tensor) -> Tensor:
        """Returns the output gradient at every position, ``(B, T, m)``; here of an output with channels second."""
        return dA.to(self.dtype).flatten(2).mT
