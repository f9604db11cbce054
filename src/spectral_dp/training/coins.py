"""Coins for Poisson sampling: random decisions about which records take part in a step.

:class:`SecureCoins` is for private runs: nobody can predict a batch. :class:`SeededCoins` is for experiments: anybody
who knows the seed can compute every batch, so sampling does not amplify privacy. It must be requested explicitly.

Formal guarantee. Both sources toss one coin for each record at each step:

* A coin shows heads with probability ``sample_rate``, to within 2⁻⁶⁴ and never more: 64 bits of ChaCha20 are compared
  with the rate.
* The coins of a source are independent of each other, under the assumption that ChaCha20 is a pseudorandom function.
  Each (key, epoch, step) has a nonce of its own, so no two steps share random bits.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from spectral_dp._processes import this_process

_CHUNK = 1 << 17  # coins tossed at a time: few enough to stay in the cache


class Coins(ABC):
    """Decides which records take part in a step. A subclass must keep the guarantee of this module."""

    #: Whether nobody can predict the tosses, so that sampling amplifies privacy.
    is_private: bool

    #: The seed that reproduces the tosses, or None if they cannot be reproduced. A checkpoint stores it.
    seed: int | None = None

    #: The fraction of the records that this source tosses coins for; the others take no part in its batches.
    share: float = 1.0

    @abstractmethod
    def tosses(self, size: int, sample_rate: float, epoch: int, first_step: int) -> Iterator[NDArray[np.intp]]:
        """Yields, for each step of an epoch from ``first_step`` on, the indices of the records that take part in it.

        Args:
            size: The number of records.
            sample_rate: The probability with which each record takes part.
            epoch: The number of the epoch, counted from 0.
            first_step: The first step to toss coins for. The iterator never ends.
        """


class SecureCoins(Coins):
    """Unpredictable coins: ChaCha20 with a new key from the operating system for every epoch.

    The key is never stored. When an epoch starts again, from this source or from a copy of it, the coins are new. So
    are those of the rest of an epoch in a forked process: from its next step on, it has batches of its own.
    (A ``torch.Generator`` on the CPU would not be secure: it has only 2³² seeds, and an attacker can try them all.)
    """

    is_private = True

    def tosses(self, size: int, sample_rate: float, epoch: int, first_step: int) -> Iterator[NDArray[np.intp]]:
        """Yields fresh tosses."""
        key, process = os.urandom(32), this_process()
        for step in itertools.count(first_step):
            if this_process() != process:  # two processes with the same batches would not be two samples
                key, process = os.urandom(32), this_process()
            yield _toss(key, size, sample_rate, epoch, step)


class SeededCoins(Coins):
    """Reproducible coins for experiments and tests. They hide nothing from anybody who can guess the seed.

    Args:
        seed: Any integer.
        reproducibility_over_privacy: Must be ``True``, to confirm that the batches may be predictable.

    Raises:
        ValueError: If ``reproducibility_over_privacy`` is not ``True``.
    """

    is_private = False

    def __init__(self, seed: int, *, reproducibility_over_privacy: bool = False) -> None:
        if reproducibility_over_privacy is not True:
            raise ValueError(
                f"batches drawn from seed {seed} are known to whoever knows the seed, so sampling does not amplify "
                "privacy: use SecureCoins(), or pass reproducibility_over_privacy=True for an experiment"
            )
        self.seed = seed

    def tosses(self, size: int, sample_rate: float, epoch: int, first_step: int) -> Iterator[NDArray[np.intp]]:
        """Yields the tosses that belong to the seed and the epoch."""
        key = hashlib.sha256(f"Poisson {self.seed}".encode()).digest()
        return (_toss(key, size, sample_rate, epoch, step) for step in itertools.count(first_step))


def _toss(key: bytes, size: int, sample_rate: float, epoch: int, step: int) -> NDArray[np.intp]:
    largest = np.uint64(int(sample_rate * 2.0**64) - 1)  # of 2^64 words, floor(q 2^64) are heads
    nonce = bytes(8) + epoch.to_bytes(4, "little") + step.to_bytes(4, "little")  # the first 8 bytes count blocks
    stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    heads = []
    for start in range(0, size, _CHUNK):
        words = np.frombuffer(stream.update(bytes(8 * min(_CHUNK, size - start))), dtype="<u8")
        heads.append(start + np.flatnonzero(words <= largest))
    return np.concatenate(heads)
