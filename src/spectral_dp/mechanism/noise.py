"""Sources of Gaussian noise.

There are two sources with the same interface:

- :class:`SecureNoise` is for releases. Its bits come from AES-256 in counter mode, with keys from the operating system.
- :class:`SeededNoise` is for experiments. Whoever knows the seed can subtract the noise, so the caller must ask for it
  explicitly.

Formal guarantee. The secure source draws independent standard normal values in float64 and rounds them once, to the
requested dtype. The guarantees of this library are those of the Gaussian mechanism over the *real* numbers. The
following differences remain in floating point:

- Box-Muller on 64-bit uniform numbers cannot produce values beyond ``sqrt(2 * 64 * ln 2) ~ 9.42`` standard deviations.
  Each value would be beyond with probability 5e-21, which is far below any δ in use. The angle of a pair of values has
  64 bits, too. In float64, the uniform numbers of radius and angle have steps of at most 3e-16.
- The bits are pseudorandom. The blocks of AES under one key differ, which random blocks need not: after ``n`` values
  under one key, this shows with probability below ``n² / 2^131``. A key makes the values of one draw and is forgotten.
- The set of floats that ``value + noise`` can reach depends on ``value``. An adversary who sees all low-order bits of
  an *exactly known* query can exploit this (Mironov 2012). Rounding a float64 normal to float32, summing over records
  and applying the inverse transform make it harder, but none of them is a proof against it. If your adversary model
  includes this attack, use a discrete mechanism.
- Sampling rejects nothing, and no branch of this file depends on a random bit. What single instructions of the
  processor take is not in our hands.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from spectral_dp._processes import this_process

_BLOCK = 1 << 16  # values made at a time: few enough to stay in the cache, enough to hide the price of the calls
_ZEROS = bytes(8 * _BLOCK)  # encrypted, they are the key stream

# NumPy has logarithm and tangent of float64 in vector instructions of 512 bits (two to four times faster than torch's),
# and of nothing less (three times slower). Both are exact to a few units in the last place.
_ELEMENTARY: Any = np if torch.backends.cpu.get_cpu_capability() == "AVX512" else torch


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

    AES-256 makes the bits, in counter mode, with a new key from the operating system for every draw. Box-Muller makes
    normal values of them in float64. Keys are never kept. Values that were drawn for requests to come are kept, but
    never saved: a copied, pickled or forked source has none of them, so that two sources never return the same.
    """

    is_private = True

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._reserves: list[Tensor] = []  # of float64; as many as there were threads that drew at once
        self._process = this_process()  # last: a thread that finds its own process here finds reserves of its own, too

    def normal(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns new standard normal values of this shape, dtype and device."""
        if this_process() != self._process:
            self._forget()
        if not dtype.is_floating_point:
            raise TypeError(f"noise is real and has fractions, so it has no values of {dtype}: use a float dtype")
        count = math.prod(shape)
        out = _draw(count, dtype) if count > _BLOCK else self._take(count).to(dtype, copy=True)
        return out.view(tuple(shape)).to(device)

    def _take(self, count: int) -> Tensor:
        try:
            reserve = self._reserves.pop()  # in one instruction, so that no two threads have the same one
        except IndexError:
            reserve = _NONE
        kept = len(reserve)
        taken, rest = reserve.split([min(count, kept), max(kept - count, 0)])
        if count > kept:  # most parameters are small, so one draw serves many of them
            drawn = _draw(_BLOCK, torch.float64)
            taken, rest = torch.cat([taken, drawn[: count - kept]]), drawn[count - kept :]
        self._reserves.append(rest)
        return taken

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._forget()


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


def _draw(count: int, dtype: torch.dtype) -> Tensor:
    """Returns new standard normal values, made by as many threads as torch uses."""
    with torch.inference_mode(False):  # which is a property of each thread, and all of them write into this tensor
        out = torch.empty(count, dtype=dtype, device="cpu")
        blocks = out.split(_BLOCK)
        threads = min(torch.get_num_threads(), (len(blocks) + 1) // 2)
        if threads == 1:
            _fill(blocks)
        else:
            with ThreadPoolExecutor(threads) as pool:  # ends with the draw: nothing is running when a process forks
                list(pool.map(_fill, (blocks[i::threads] for i in range(threads))))
    return out


def _fill(blocks: Sequence[Tensor]) -> None:
    """Fills tensors of at most ``_BLOCK`` elements, the first of them the largest, under a key of their own."""
    pairs = (len(blocks[0]) + 1) // 2
    stream = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
    bits = torch.empty(2, pairs, dtype=torch.int64, device="cpu")
    buffers = [torch.empty(pairs, dtype=torch.float64, device="cpu") for _ in range(3)]
    zeros, key_stream = memoryview(_ZEROS)[: 16 * pairs], bits.numpy().data.cast("B")
    for out in blocks:
        if stream.update_into(zeros, key_stream) != len(zeros):
            raise RuntimeError("the cipher made fewer random bytes than it was asked for")
        _box_muller(bits, buffers, out)


def _box_muller(bits: Tensor, buffers: Sequence[Tensor], out: Tensor) -> None:
    """Fills ``out`` with standard normal values.

        r = sqrt(-2 ln u)    (x, y) = (r sin 2φ, r cos 2φ)    sin 2φ = 2 t / (1 + t²)    cos 2φ = 2 / (1 + t²) - 1

    where u is uniform in (0, 1) and φ in (-π/2, π/2), t = tan φ: one tangent instead of a sine and a cosine.

    Args:
        bits: Uniform int64, ``(2, pairs)``: those of the radius and those of the angle of each pair of values.
        buffers: Three tensors of float64 with an element for each pair, which are overwritten.
        out: Tensor to fill, with at most as many elements as there are pairs of values.
    """
    r, t, q = buffers
    # Integers k become u = |k + 1/2| / 2^63, between 2^-64 and 1 - 2^-52: no radius is infinite, and none is zero.
    r.copy_(bits[0])
    torch.add(_RADIUS_OFFSET, r, alpha=2.0**-63 * (1 - 2.0**-52), out=r).abs_()
    _apply("log", r)
    np.sqrt(r.mul_(-8).numpy(), out=r.numpy())  # 2 r
    # Fewer bits would put a pair on rays from the true value, which an adversary can look for: 32 of them show in the
    # 12th digit of a pair, and in float32 where one value of it is small.
    t.copy_(bits[1])
    torch.add(_ANGLE_OFFSET, t, alpha=math.pi * 2.0**-64, out=t)
    _apply("tan", t)
    torch.addcmul(_ONE, t, t, out=q).reciprocal_().mul_(r)  # 2 r / (1 + t²)
    first = len(out) // 2
    out[:first] = t.mul_(q)[:first]
    out[first:] = q.add_(r, alpha=-0.5)[: len(out) - first]


def _apply(name: str, x: Tensor) -> None:
    """Replaces each number by its logarithm or tangent."""
    array = x.numpy() if _ELEMENTARY is np else x
    getattr(_ELEMENTARY, name)(array, out=array)


# Half a step of the integers above, so that none of them is zero. Tensors of no dimension: one pass over memory each.
_RADIUS_OFFSET = torch.tensor(2.0**-64, dtype=torch.float64, device="cpu")
_ANGLE_OFFSET = torch.tensor(math.pi * 2.0**-65, dtype=torch.float64, device="cpu")
_ONE = torch.tensor(1.0, dtype=torch.float64, device="cpu")
_NONE = torch.empty(0, dtype=torch.float64, device="cpu")
