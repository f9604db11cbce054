"""The attributes of an Opacus optimizer that training scripts read and set, under Opacus' names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spectral_dp.gradients.model import ModelGradients
from spectral_dp.mechanism.clipping import Clipping, FlatClipping, PerLayerClipping
from spectral_dp.mechanism.noise import NoiseSource

_NO_PIECES = "one call of step() clips, sums, noises and descends, in the one order that is private: call step()"
_NO_GRADIENTS = (
    "per-sample gradients are never formed, and their sum carries no noise, so that reading it would be a release that "
    "nobody accounts for: read parameter.grad after step(), which is what was released"
)
#: Names of Opacus that do not exist here, and what to write instead.
_REFUSED = {
    "grad_samples": _NO_GRADIENTS,
    "summed_grad": _NO_GRADIENTS,
    "clip_and_accumulate": _NO_PIECES,
    "add_noise": _NO_PIECES,
    "scale_grad": _NO_PIECES,
    "pre_step": _NO_PIECES,
    "max_grad_norm": "this clipping names no bound: read or set optimizer.clipping",
    "signal_skip_step": (
        "the private loader says which batch ends a logical step. Give make_private max_physical_batch_size, or import "
        "BatchMemoryManager from spectral_dp.utils.batch_memory_manager"
    ),
}


class OpacusNames:
    """The attributes of Opacus' ``DPOptimizer`` that scripts and schedulers use."""

    original_optimizer: Optimizer
    clipping: Clipping
    noise: NoiseSource
    gradients: ModelGradients
    _step_hook: RemovableHandle | None = None

    @property
    def max_grad_norm(self) -> float | Sequence[float]:
        """The clipping bound, or the list of the layers' bounds. It can be set between two logical steps.

        The noise follows the bound, because its deviation is the noise multiplier times the sensitivity.
        """
        if isinstance(self.clipping, FlatClipping):
            return self.clipping.max_norm
        if isinstance(self.clipping, PerLayerClipping):
            bounds = self.clipping.max_norms
            return bounds if isinstance(bounds, int | float) else list(bounds)
        raise AttributeError  # __getattr__ says why

    @max_grad_norm.setter
    def max_grad_norm(self, bound: float | Sequence[float]) -> None:
        changed: Clipping
        if isinstance(self.clipping, FlatClipping):
            if not isinstance(bound, int | float):
                raise ValueError(f"{type(self.clipping).__name__} has one bound, got {bound!r}: give a number")
            changed = dataclasses.replace(self.clipping, max_norm=_plain(bound))
        elif isinstance(self.clipping, PerLayerClipping):
            bounds = _plain(bound) if isinstance(bound, int | float) else tuple(map(_plain, bound))
            changed = dataclasses.replace(self.clipping, max_norms=bounds)
        else:
            raise AttributeError(f"{type(self.clipping).__name__} names no bound: set optimizer.clipping")
        changed.noise_bounds([1] * len(self.gradients.trained_blocks))  # an error unless there is one bound per block
        self.clipping = changed

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters that the wrapped optimizer trains."""
        return [p for group in self.original_optimizer.param_groups for p in group["params"] if p.requires_grad]

    @property
    def accumulated_iterations(self) -> int:
        """Always 1: a logical step is one draw of the sampler, however many physical batches it takes."""
        return 1

    @property
    def secure_mode(self) -> bool:
        """Whether nobody can predict the noise."""
        return self.noise.is_private

    def attach_step_hook(self, fn: Callable[[Any], None]) -> None:
        """Calls ``fn(optimizer)`` after every release, before the wrapped optimizer steps. Replaces an earlier hook.

        In Opacus this hook keeps the ledger. Here it does not, so replacing it does not change the accounting.
        """
        if self._step_hook is not None:
            self._step_hook.remove()
        self._step_hook = self.original_optimizer.register_step_pre_hook(lambda *_: fn(self))

    if not TYPE_CHECKING:  # type checkers should find names that do not exist

        def __getattr__(self, name: str) -> NoReturn:
            reason = f": {_REFUSED[name]}" if name in _REFUSED else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{reason}")


def _plain(bound: float) -> float:
    """Converts NumPy numbers to Python numbers, because a checkpoint compares bounds by their ``repr``."""
    return bound if type(bound) is int else float(bound)
