"""Taking the place of chance: a script that says beforehand what every draw of noise will be, and coins that do.

A release is linear in the noise it draws. Fed zeros it shows its signal, fed unit vectors the map from noise to
output, so the covariance of its noise can be read off exactly. The script reaches a release in one of two ways: as a
:class:`~spectral_dp.NoiseSource`, or, for code that knows nothing of us, by answering torch's own samplers
(``randn``, ``randn_like``, ``normal``, ``normal_``) for the time of one call. Which records a step is made of is chosen
in the same way, by giving the loader :class:`ScriptedCoins`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spectral_dp.mechanism.noise import NoiseSource
from spectral_dp.training.coins import Coins


class Script:
    """What to serve in place of standard normals: a stream of numbers, zeros after its end.

    Args:
        values: The stream, flat; None for zeros.

    Attributes:
        shapes: What has been asked for so far.
    """

    def __init__(self, values: Tensor | None = None) -> None:
        self._values = torch.zeros(0) if values is None else values
        self._position = 0
        self.shapes: list[tuple[int, ...]] = []

    @property
    def drawn(self) -> int:
        """How many numbers have been asked for."""
        return self._position

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Serves the next numbers of the stream."""
        count = math.prod(shape)
        out = torch.zeros(count, dtype=dtype, device=device)
        part = self._values[self._position : self._position + count]
        out[: len(part)] = part.to(out)
        self._position += count
        self.shapes.append(tuple(shape))
        return out.view(tuple(shape))


class ScriptedSource(NoiseSource):
    """A noise source that reads from a script. It hides nothing: for audits only."""

    is_private = False

    def __init__(self, script: Script) -> None:
        self._script = script

    def normal(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The next numbers of the script."""
        return self._script.take(shape, dtype, device)


class ScriptedCoins(Coins):
    """Coins that fall on the first so many records at every step. They hide nothing: for audits only."""

    is_private = False

    def __init__(self, records: int) -> None:
        self._records = records

    def tosses(self, size: int, sample_rate: float, epoch: int, first_step: int) -> Iterator[NDArray[np.intp]]:
        """The same records at every step, whatever the rate."""
        return itertools.repeat(np.arange(self._records))


class TorchNoise(TorchFunctionMode):
    """While active, torch's samplers of normal numbers read from a script."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Lets everything pass but the samplers."""
        kwargs = dict(kwargs or {})
        sampler = _SAMPLERS.get(func)
        if sampler is None:
            return func(*args, **kwargs)
        drawn = func(*args, **kwargs)  # for its shape, dtype and device, and for torch's own checks
        mean, std = sampler(args, kwargs)
        return drawn.copy_(mean + std * self._standard(drawn))

    def _standard(self, like: Tensor) -> Tensor:
        if like.is_complex():  # torch's complex normals have variance 1 in all, half in either part
            parts = self._script.take((*like.shape, 2), like.real.dtype, like.device)
            return torch.view_as_complex(parts) / math.sqrt(2)
        return self._script.take(like.shape, like.dtype, like.device)


def _is_standard(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    return 0.0, 1.0


def _of_normal(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    mean = args[0] if args else kwargs.get("mean", 0.0)
    return mean, args[1] if len(args) > 1 else kwargs.get("std", 1.0)


def _of_method(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    return _of_normal(args[1:], kwargs)


_SAMPLERS: dict[Any, Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, Any]]] = {
    torch.randn: _is_standard,
    torch.randn_like: _is_standard,
    torch.normal: _of_normal,
    torch.Tensor.normal_: _of_method,
}
