"""What a rule is: it knows the per-sample gradients of one kind of layer.

Letters, here and in every rule:

    B   samples            x   (B, ...) input of the layer, as recorded
    M   kept coordinates   dA  (B, ...) gradient of the loss with respect to the layer's output
    c   (B,) weight of each sample, the clipping factors

The per-sample gradient ``g_b`` of a layer is never released. What is released is ``sum_b c_b z_b`` with
``z_b = a * (T g_b)`` (``mechanism/projection.py``); the ``c_b`` are made from the squared norms ``||z_b||²``. Weight
and bias of a layer are one block: their squared norms add.

Every rule can form the ``z_b``. One that finds norm and sum without them is a :class:`GhostRule`. Which of the two
happens to a layer that is used is decided in ``uses.py``. A rule is registered with ``register_rule``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from spectral_dp.gradients.recording.recorder import Call
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.mechanism.filters import IdentityFilter
from spectral_dp.mechanism.gains import Gains
from spectral_dp.mechanism.projection import Projection
from spectral_dp.mechanism.transforms import Transform, TransformName, get_transform

Module = TypeVar("Module", bound=nn.Module)


class Rule(ABC, Generic[Module]):
    """Forms one layer's per-sample gradients, in filtered spectral coordinates; a subclass has one method, ``form``.

    Formal guarantee. Norm and sum are of the same numbers, whatever :meth:`form` computes, and a sample that is left
    out is removed from those numbers, not from what they are made of. So neither rounding, underflow nor a function
    that is not finite at zero can make a sample count for more than its bound.

    ``B`` times the layer's parameters are held from its backward pass until the clipped sum, in place of ``x`` and
    ``dA``.

    Attributes:
        module: The layer.
        config: What is released of it.
        transform: The transform of its coordinates.
        projection: The transform with the filter's gains of the current step, or None where nothing is filtered: then
            no transform is made either, since without a filter an orthonormal transform changes nothing.
    """

    #: Transform used where the layer's :class:`LayerConfig` names none.
    default_transform: ClassVar[TransformName] = "dct"

    def __init__(self, module: Module, config: LayerConfig) -> None:
        self.module = module
        self.config = config
        self.transform: Transform = get_transform(config.transform or self.default_transform)
        self.projection: Projection | None = None
        self.begin_step(0)

    @abstractmethod
    def form(self, x: Any, dA: Tensor) -> dict[str, Tensor]:
        """Returns the gradients of each trained parameter, ``(B, ...)``, stored in any order.

        Of a filtered weight these are the coordinates that count in the clipped norm, last: ``(B, ..., M)``. In the
        paper's order (clip, then filter) some of them are dropped afterwards.
        """

    def begin_step(self, step: int) -> None:
        """Fixes the gains of a step, before it reads any data."""
        filter, shape = self.config.filter, self.coordinate_shape()
        if isinstance(filter, IdentityFilter):
            return
        if shape is None:
            raise ValueError(
                f"{type(self.module).__name__} has no spectrum to filter, but was given {filter!r}: leave the filter "
                "out for this layer, or give the input_layout of a dense layer fed by an image or a sequence"
            )
        self._filter_by(filter.gains(self.transform, shape, step))

    def _filter_by(self, gains: Gains) -> None:
        if gains is not self.gains:  # else the matrices that were made for these gains are still good
            self.projection = Projection(self.transform, gains)

    @property
    def gains(self) -> Gains | None:
        """The filter's gains of the current step; None where nothing is filtered."""
        return None if self.projection is None else self.projection.gains

    def matrix(self, like: Tensor, *, counted: bool = False) -> Tensor | None:
        """Returns :meth:`Projection.matrix`, ``(M, N)``; None where nothing is filtered."""
        return None if self.projection is None else self.projection.matrix(like, counted=counted)

    def input_of(self, call: Call) -> Any:
        """Returns what the rule needs to know of a call, its ``x``: the first argument."""
        return call.args[0] if call.args else next(iter(call.kwargs.values()))

    def coordinate_shape(self) -> tuple[int, ...] | None:
        """Returns the shape over which the weight is transformed and filtered; None if it is not."""
        return None

    def leading_shape(self) -> tuple[int, ...]:
        """Returns the dimensions of the weight that are not transformed."""
        shape = self.coordinate_shape()
        return tuple(self.parameter("weight").shape[: -len(shape)]) if shape else ()

    def coefficient_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a parameter's coefficients in a clipped sum, known without any data."""
        if name == "weight" and self.gains is not None:
            return (*self.leading_shape(), self.gains.count)
        return tuple(self.parameter(name).shape)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that the rule covers: the module's own, each once."""
        first_names: dict[nn.Parameter, str] = {}
        for name, parameter in self.module._parameters.items():
            if parameter is not None:
                first_names.setdefault(parameter, name)
        return {name: parameter for parameter, name in first_names.items()}

    def parameter(self, name: str) -> nn.Parameter:
        """Returns one of them."""
        return self.parameters()[name]

    def trained(self) -> dict[str, nn.Parameter]:
        """Returns those of them that are being trained."""
        return {name: parameter for name, parameter in self.parameters().items() if parameter.requires_grad}

    def trains(self, name: str) -> bool:
        """Returns whether the layer has a parameter of this name that is being trained."""
        parameter = self.module._parameters.get(name)
        return parameter is not None and parameter.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        """What to compute in, whatever autocast or a half-precision model made of inputs and gradients."""
        return torch.promote_types(next(iter(self.parameters().values())).dtype, torch.float32)

    def released(self, name: str, total: Tensor) -> Tensor:
        """Returns what is released of a sum of what :meth:`form` returned, in :meth:`coefficient_shape`."""
        if name == "weight" and self.projection is not None:
            total = self.projection.kept_of_counted(total)
        return total.reshape(self.coefficient_shape(name))

    def gradient(self, name: str, coefficients: Tensor) -> Tensor:
        """Turns coefficients of a parameter, noisy or not, into a gradient: post-gain, inverse transform."""
        if name == "weight" and self.projection is not None:
            coefficients = self.projection.synthesise(coefficients)
        return coefficients.reshape(self.parameter(name).shape)


class GhostRule(Rule[Module]):
    """Finds norms and clipped sums of one layer without forming its per-sample gradients.

    Formal guarantee. What one sample adds to :meth:`clipped_sum`, divided by its weight, is no longer than its norm in
    :meth:`squared_norms`, up to the clip's rounding guard. The two are computed in different ways and their rounding
    errors differ, so it is the subclass that keeps this promise: by norms that are rounded up (``norms.py``).

    Both agree with a loop over samples to rounding; neither approximates. Samples that are left out, because their
    gradients are not finite, do not reach :meth:`clipped_sum` at all. Gradients are still formed where a parameter is
    used more than once, since its gradients must be added before the norm is taken, and where :meth:`forms` says so.
    """

    def forms(self, x: Any, dA: Tensor) -> bool:
        """Returns whether to form the gradients of a use all the same, because that is cheaper for these shapes."""
        return False

    @abstractmethod
    def squared_norms(self, x: Any, dA: Tensor) -> Tensor:
        """Returns ``||z_b||²`` over all trained parameters of the layer, ``(B,)``."""

    @abstractmethod
    def clipped_sum(self, x: Any, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Returns ``sum_b c_b z_b`` of each trained parameter, kept coordinates last: ``(..., M)``."""

    def merge(self, uses: Sequence[tuple[Any, Tensor]]) -> tuple[Any, Tensor] | None:
        """Returns one use ``(x, dA)`` with the gradient of several, if the layer kind can express it; else None."""
        return None
