"""Where Gaussian noise comes from.

Two sources, one method. :class:`SecureNoise` is for releases: its bits come from ChaCha20 keyed by the operating
system's entropy. :class:`SeededNoise` is for experiments: whoever knows the seed can subtract the noise, so it must
be asked for in so many words.

Formal guarantee. The secure source draws independent standard normals in float64 and rounds once to the dtype asked
for. The guarantees of this library are those of the Gaussian mechanism over the *reals*; this is what floating point
leaves open:

* Box-Muller on 53-bit uniforms cannot produce values beyond ``sqrt(2 * 53 * ln 2) ~ 8.57`` deviations (probability
  2e-17 each): far below any δ in use.
* The set of floats that ``value + noise`` can reach depends slightly on ``value``, which an adversary who sees
  all low-order bits of a *single, exactly known* query can exploit (Mironov 2012). Rounding a float64 normal to
  float32, summing over records and passing through the inverse transform blur this; none of them is a proof. Where the
  adversary model includes it, use a discrete mechanism.
* Sampling time depends on how many values are drawn, never on their values.
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

_CHUNK = 1 << 17  # normals made at a time: few enough to stay in the cache, enough to keep all cores busy
_SMALL = 1 << 13  # more than that are worth the overhead of a draw of their own


class NoiseSource(ABC):
    """A stream of independent standard normal values. No value is ever handed out twice."""

    #: Whether the noise can be predicted by nobody, so that it protects a release.
    is_private: bool

    @abstractmethod
    def normal(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns fresh standard normals of that shape."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what is needed to go on with the same stream; empty where a stream must not be repeated."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state to restore, got keys {sorted(state)}")


class SecureNoise(NoiseSource):
    """Gaussian noise from a cryptographic generator.

    ChaCha20 under a fresh 256-bit key from the operating system makes the bits, Box-Muller in float64 the normals.
    The key lives in this object only: it is not saved, and a copied, pickled or forked source draws a new key, so that
    two of them never repeat each other.
    """

    is_private = True

    def __init__(self) -> None:
        self._rekey()

    def _rekey(self) -> None:
        key, nonce = (
            os.urandom(32),
            bytes(8) + os.urandom(8),
        )  # the first 8 bytes count blocks: 2^70 bytes a key
        self._stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
        self._reserve = torch.empty(0, dtype=torch.float64)
        self._one_at_a_time = threading.Lock()  # a new one in a forked process: the old one may be held for ever
        self._pid = os.getpid()

    def normal(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns fresh standard normals of that shape."""
        if os.getpid() != self._pid:
            self._rekey()
        with self._one_at_a_time:
            out = self._take(math.prod(shape), dtype)
        return out.view(tuple(shape)).to(device)

    def _take(self, count: int, dtype: torch.dtype) -> Tensor:
        if count > _SMALL:
            return self._draw(count, dtype)
        if count > len(self._reserve):  # most parameters have few numbers: one draw serves many of them
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
    """Reproducible Gaussian noise, for experiments and tests. It protects nothing from whoever can guess the seed.

    Args:
        seed: Any integer.
        reproducibility_over_privacy: Must be ``True``; says that the noise may be predictable.
        device: Where values are drawn; the stream of a seed differs between kinds of device.
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
        """Returns the next standard normals of the seed's stream."""
        here = self._generator.device
        return torch.randn(tuple(shape), generator=self._generator, dtype=dtype, device=here).to(device)

    def state_dict(self) -> dict[str, Any]:
        """The generator's position in its stream."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved position."""
        if set(state) != {"generator"}:
            raise ValueError(f"not the state of a SeededNoise: keys {sorted(state)}")
        self._generator.set_state(state["generator"])


def _box_muller(words: Tensor, out: Tensor) -> None:
    """Fills ``out`` with normals made of 64-bit random ``words`` (an even number, at least as many; overwritten)."""
    integers = words.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1).double()
    half = words.numel() // 2
    radius = integers[:half].add_(1).mul_(2.0**-53).log_().mul_(-2).sqrt_()  # of uniforms in (0, 1]: finite
    angle = integers[half:].mul_(2 * math.pi * 2.0**-53)
    first = angle.cos().mul_(radius)[: out.numel()]
    out[: first.numel()] = first
    out[first.numel() :] = angle.sin_().mul_(radius)[: out.numel() - first.numel()]
