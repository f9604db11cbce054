"""What a module was called with, as rules are told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from spectral_dp.gradients.recording.random_state import RandomState
from spectral_dp.gradients.recording.shared import Shared


class Call(NamedTuple):
    """Everything a module was called with.

    Attributes:
        args: Its arguments.
        kwargs: Its keyword arguments.
        buffers: Those of its buffers that its forward pass wrote, as it left them.
        output: Its (first) output, where the recorder was asked for it and nobody has changed it in place.
        random_state: The generators as its forward pass found them, where it drew from them and the recorder was asked.
        has_rows: Whether tensors with rows of samples, and the output gradient, come as ``(B, k, ...)``: with the ``k``
            rows of each sample; or, where the samples share the input, with all of it for each of them.
        is_shared: Whether they do.
        parameter: The name of the parameter that the module holds itself, if this is the use of one: there are no
            arguments then, and what comes as the output gradient is the parameter's own, ``(B, ...)``.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    buffers: Mapping[str, Tensor] = MappingProxyType({})
    output: Tensor | None = None
    random_state: RandomState | None = None
    has_rows: bool = False
    is_shared: bool = False
    parameter: str | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors that a module was called with; of those that samples share, the wide ones."""
        leaves = self.args if self._is_flat else tree_leaves((self.args, dict(self.kwargs)))
        return [of_samples(v) for v in leaves if isinstance(v, Tensor)]

    def wide(self, samples: int) -> Call:
        """A call that samples share, with an entry for each in all that it was called with."""
        call = self._mapped(lambda t: t.wide if isinstance(t, Shared) else t.expand(samples, *t.shape))
        return call._replace(has_rows=True, is_shared=True)

    def with_rows(self, n: int, samples: int) -> Call:
        """A call with several rows of each sample, side by side, with a dimension for them."""

        def unflattened(t: Tensor) -> Tensor:
            return t.unflatten(0, (samples, n // samples)) if t.ndim > 0 and len(t) == n else t

        return self._mapped(unflattened)._replace(has_rows=True)

    def detached(self) -> Call:
        """A call without what autograd keeps for it."""
        return self._mapped(Tensor.detach)

    def shapes(self) -> Call:
        """A call without the numbers that its tensors hold: each stands there with its shape, on the meta device."""
        return self._mapped(lambda t: torch.empty_like(t, device="meta"))

    @property
    def _is_flat(self) -> bool:
        """Whether there are tensors only, one after the other, as nearly always."""
        return not self.kwargs and all(isinstance(value, Tensor) for value in self.args)

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Call:
        """A call with other tensors in the places of its own."""
        if self._is_flat:
            return self._replace(args=tuple(map(function, self.args)))
        args, kwargs = tree_map_only(Tensor, function, (self.args, dict(self.kwargs)))
        return self._replace(args=args, kwargs=kwargs)


class OutputGradients(NamedTuple):
    """The gradients of the loss with respect to all real outputs of a module whose backward pass is taken over.

    Attributes:
        gradients: One for each output, in their order; None where the loss does not depend on it.
        needed: The identities of those tensors of the call whose gradients are needed further back.
    """

    gradients: tuple[Tensor | None, ...]
    needed: frozenset[int]

    def needs(self, value: Any) -> bool:
        """Returns whether the gradient of a tensor of the call is needed."""
        return id(value) in self.needed


class TakenOver(NamedTuple):
    """What comes of taking over the backward pass of a module.

    Attributes:
        kept: What is kept of the use.
        input_gradients: Tensors of the call, each with the gradient of the loss with respect to it.
    """

    kept: Any
    input_gradients: Sequence[tuple[Tensor, Tensor]]


def of_samples(tensor: Tensor) -> Tensor:
    """What stands behind a shared tensor; another one as it is."""
    return tensor.wide if isinstance(tensor, Shared) else tensor
