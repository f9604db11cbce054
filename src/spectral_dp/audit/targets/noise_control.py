"""Taking the place of chance: a script that says beforehand what every draw of noise will be, and coins that do.

A release is linear in the noise it draws. Fed zeros it shows its signal, fed unit vectors the map from noise to
output, so the covariance of its noise can be read off exactly. The script reaches a release in one of two ways: as its
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


class Script(NoiseSource):
    """A noise source that serves a given stream of numbers, and zeros after its end. It hides nothing: for audits only.

    Args:
        values: The stream, flat. If None, all numbers are zeros.

    Attributes:
        shapes: The shapes that have been asked for so far.
    """

    is_private = False

    def __init__(self, values: Tensor | None = None) -> None:
        self._values = torch.zeros(0) if values is None else values
        self._position = 0
        self.shapes: list[tuple[int, ...]] = []

    @property
    def drawn(self) -> int:
        """How many numbers have been asked for."""
        return self._position

    def normal(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Returns the next numbers of the stream."""
        count = math.prod(shape)
        out = torch.zeros(count, dtype=dtype, device=device)
        part = self._values[self._position : self._position + count]
        out[: len(part)] = part.to(out)
        self._position += count
        self.shapes.append(tuple(shape))
        return out.view(tuple(shape))

    def take_over(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Stands as if these shapes had been asked for, as another rank of the same release did."""
        self.shapes = list(shapes)
        self._position = sum(map(math.prod, shapes))


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
        drawn = func(*args, **kwargs)  # of a sampler: for its shape, dtype and device, and for torch's own checks
        if func not in _SAMPLERS:
            return drawn
        mean, std = _mean_and_std(func, args, kwargs)
        return drawn.copy_(mean + std * self._standard(drawn))

    def _standard(self, like: Tensor) -> Tensor:
        if like.is_complex():  # torch's complex normals have variance 1 in all, half in either part
            parts = self._script.normal((*like.shape, 2), dtype=like.real.dtype, device=like.device)
            return torch.view_as_complex(parts) / math.sqrt(2)
        return self._script.normal(like.shape, dtype=like.dtype, device=like.device)


_SAMPLERS = {torch.randn, torch.randn_like, torch.normal, torch.Tensor.normal_}


def _mean_and_std(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the mean and the deviation that a sampler was asked for."""
    if func in (torch.randn, torch.randn_like):
        return 0.0, 1.0
    args = args[1:] if func is torch.Tensor.normal_ else args  # without the tensor itself
    mean = args[0] if args else kwargs.get("mean", 0.0)
    return mean, args[1] if len(args) > 1 else kwargs.get("std", 1.0)
