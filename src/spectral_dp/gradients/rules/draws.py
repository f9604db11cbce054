"""The random numbers that a module draws for a batch, to be given to each of its samples again when it runs alone.

A dropout mask of a batch holds one mask for each sample. A sample that is run alone must get its own, not those of a
second draw. So what the operations that draw have returned for the batch is written down, in their order, and given
again in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spectral_dp.errors import SpectralDPError

#: Operations whose result is nothing but random numbers. Others mix them with data, so they cannot be given again.
_PURE = frozenset(
    f"{name}{variant}"
    for name in ("bernoulli", "exponential", "normal", "rand", "randint", "randn", "random", "uniform")
    for variant in ("", "_", "_like", "_functional")
)


class CannotRepeatError(SpectralDPError, RuntimeError):
    """Random numbers were drawn that cannot be given again."""


class Draws(TorchDispatchMode):
    """Writes down what is drawn.

    Attributes:
        drawn: The results, in their order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _draws(func, args, kwargs or {}):
            self.drawn.append((result[1] if _is_fused(func) else result).detach().clone())
        return result


class GivenDraws(TorchDispatchMode):
    """Gives again what was drawn for a batch.

    Args:
        drawn: What was drawn.
        samples: How many samples the batch has.
        sample: The number of the sample that is run; None where all are run side by side, in a first dimension.
    """

    def __init__(self, drawn: list[Tensor], samples: int, sample: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn, self._samples, self._sample = iter(drawn), samples, sample

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _draws(func, args, kwargs or {}):
            return result
        drawn = next(self._drawn, None)
        if drawn is None:
            raise CannotRepeatError("it drew more random numbers alone than in its batch")
        if not _is_fused(func):
            return result.copy_(self._part(drawn, result).reshape(result.shape))
        mask = self._part(drawn, result[1]).reshape(result[1].shape)
        x, p = args[:2]
        return x * mask / (1 - p), mask

    def _part(self, drawn: Tensor, result: Tensor) -> Tensor:
        if self._sample is None and drawn.numel() == result.numel():
            return drawn
        if self._sample is not None and drawn.numel() == self._samples * result.numel():
            return drawn.reshape(self._samples, -1)[self._sample]
        if self._sample is not None and drawn.numel() == result.numel():  # one for all samples
            return drawn
        if self._sample is None and drawn.numel() * self._samples == result.numel():
            return drawn.expand(self._samples, *drawn.shape)
        raise CannotRepeatError("it drew another number of random numbers alone than in its batch")


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    if given.get("dropout_p") == 0:  # an attention that could have dropout
        return False
    name = func.overloadpacket.__name__
    if name not in _PURE and not _is_fused(func):
        raise CannotRepeatError(f"it draws random numbers inside of {name}")
    return True


def _is_fused(func: Any) -> bool:
    """Whether the operation is a dropout in one, as on GPUs: it returns what is left of its input, and the mask."""
    return bool(func.overloadpacket is torch.ops.aten.native_dropout)
