"""Sources of Gaussian noise.

There are two sources with the same interface:

- :class:`SecureNoise` is for releases. Its bits come from ChaCha20, with a key from the operating system.
- :class:`SeededNoise` is for experiments. Whoever knows the seed can subtract the noise, so the caller must ask for it
  explicitly.

Formal guarantee. The secure source draws independent standard normal values in float64 and rounds them once, to the
requested dtype. The guarantees of this library are those of the Gaussian mechanism over the *real* numbers. The
following differences remain in floating point:

- Box-Muller on 53-bit uniform numbers cannot produce values beyond ``sqrt(2 * 53 * ln 2) ~ 8.57`` standard deviations.
  Each value would be beyond with probability 2e-17, which is far below any δ in use.
- The set of floats that ``value + noise`` can reach depends slightly on ``value``. An adversary who sees all low-order
  bits of a *single, exactly known* query can exploit this (Mironov 2012). Rounding a float64 normal to float32, summing
  over records and applying the inverse transform make it harder, but none of them is a proof against it. If your
  adversary model includes this attack, use a discrete mechanism.
- The time of sampling depends on the number of values, never on the values.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

_CHUNK = 1 << 17  # values made at a time: few enough to stay in the cache, enough to keep all cores busy
_SMALL = 1 << 13  # a request for more values than this is worth a draw of its own


class NoiseSource(ABC):
    """A stream of independent standard normal values. No value is ever returned twice."""

    #: Whether nobody can predict the noise, so that it protects a release.
    is_private: bool

    @abstractmethod
    def normal(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns new standard normal values of this shape, dtype and device."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what is needed to continue the same stream. It is empty if a stream must not be repeated."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state to restore, got keys {sorted(state)}")


class SecureNoise(NoiseSource):
    """Gaussian noise from a cryptographic generator.

    ChaCha20 makes the bits, with a new 256-bit key from the operating system. Box-Muller makes normal values of them
    in float64. Only this object holds the key, and it is never saved. A copied, pickled or forked source draws a new
    key, so that two sources never repeat each other's values.
    """

    is_private = True

    def __init__(self) -> None:
        self._rekey()

    def _rekey(self) -> None:
        key, nonce = os.urandom(32), bytes(8) + os.urandom(8)  # the first 8 bytes count blocks: 2^70 bytes a key
        self._stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
        self._reserve = torch.empty(0, dtype=torch.float64)
        self._one_at_a_time = threading.Lock()  # new in a forked process: the old one may be held for ever
        self._pid = os.getpid()

    def normal(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns new standard normal values of this shape, dtype and device."""
        if os.getpid() != self._pid:
            self._rekey()
        with self._one_at_a_time:
            out = self._take(math.prod(shape), dtype)
        return out.view(tuple(shape)).to(device)

    def _take(self, count: int, dtype: torch.dtype) -> Tensor:
        if count > _SMALL:
            return self._draw(count, dtype)
        if count > len(self._reserve):  # most parameters are small, so one draw serves many of them
            self._reserve = self._draw(_CHUNK // 2, torch.float64)
        taken, self._reserve = self._reserve[:count], self._reserve[count:]
        return taken.to(dtype, copy=True)

    def _draw(self, count: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(count, dtype=dtype)
        random_bytes = bytearray(8 * min(_CHUNK, max(count + count % 2, 2)))
        zeros = bytes(len(random_bytes))
        for start in range(0, count, _CHUNK):
            size = min(_CHUNK, count - start)
            self._stream.update_into(zeros, random_bytes)  # zeros in, key stream out
            _box_muller(torch.frombuffer(random_bytes, dtype=torch.int64), out[start : start + size])
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._rekey()


class SeededNoise(NoiseSource):
    """Reproducible Gaussian noise for experiments and tests. It does not protect against anyone who knows the seed.

    Args:
        seed: Seed of the generator, any integer.
        reproducibility_over_privacy: Must be ``True``. It states that the noise may be predictable.
        device: Device on which the values are drawn. The same seed gives different values on different kinds of device.
    """

    is_private = False

    def __init__(
        self, seed: int, *, reproducibility_over_privacy: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        if reproducibility_over_privacy is not True:
            raise ValueError(
                f"noise from seed {seed} can be subtracted by whoever knows the seed, so it is no private noise: use "
                "SecureNoise() for a release, or pass reproducibility_over_privacy=True for an experiment"
            )
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def normal(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns the next standard normal values of the seed's stream."""
        here = self._generator.device
        return torch.randn(tuple(shape), generator=self._generator, dtype=dtype, device=here).to(device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the generator in its stream."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues the stream from a saved position."""
        if set(state) != {"generator"}:
            raise ValueError(f"not the state of a SeededNoise: keys {sorted(state)}")
        self._generator.set_state(state["generator"])


def _box_muller(words: Tensor, out: Tensor) -> None:
    """Fills ``out`` with standard normal values.

    Args:
        words: Random 64-bit words: an even number of them, at least as many as ``out`` has elements. They are
            overwritten.
        out: Tensor to fill.
    """
    integers = words.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double()
    half = words.numel() // 2
    radius = integers[:half].add_(1).mul_(2.0**-53).log_().mul_(-2).sqrt_()  # uniforms in (0, 1], so it is finite
    angle = integers[half:].mul_(2 * math.pi * 2.0**-53)
    first = angle.cos().mul_(radius)[: out.numel()]
    out[: first.numel()] = first
    out[first.numel() :] = angle.sin_().mul_(radius)[: out.numel() - first.numel()]
