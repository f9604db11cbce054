"""Where the coins of Poisson sampling come from.

Two sources, one method, as for noise. :class:`SecureCoins` is for private runs: nobody can predict a batch.
:class:`SeededCoins` is for experiments: whoever knows the seed knows every batch, so that sampling amplifies nothing,
and it must be asked for in so many words.

Formal guarantee. Both toss one coin for each record at each step, independent of all other coins of the source. It
shows heads with probability ``sample_rate`` (to within 2⁻⁶⁴, never more), by comparing 64 bits of ChaCha20 with it. The
coins of a (key, epoch, step) are those of one nonce, so no two steps share any.
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

_CHUNK = 1 << 17  # coins tossed at a time: few enough to stay in the cache


class Coins(ABC):
    """Decides which records take part in a step. A subclass of your own answers for the guarantee of this module."""

    #: Whether the tosses can be predicted by nobody, so that sampling amplifies privacy.
    is_private: bool

    #: What the tosses can be repeated from; None where they cannot be. A checkpoint holds it.
    seed: int | None = None

    @abstractmethod
    def tosses(self, size: int, sample_rate: float, epoch: int, first_step: int) -> Iterator[NDArray[np.intp]]:
        """Yields, for each step of an epoch from ``first_step`` on, the numbers of the records that take part in it.

        Args:
            size: How many records there are.
            sample_rate: The probability of each.
            epoch: Which epoch it is, counted from 0.
            first_step: The first step to toss for; there is no last one.
        """


class SecureCoins(Coins):
    """Coins from ChaCha20 under a key that the operating system draws for every epoch.

    The key is never stored. An epoch that is begun again, by this source or by a copy of it, tosses other coins.
    (A ``torch.Generator`` on the CPU would not do: it has 2³² seeds, few enough to try.)
    """

    is_private = True

    def tosses(self, size: int, sample_rate: float, epoch: int, first_step: int) -> Iterator[NDArray[np.intp]]:
        """Yields fresh tosses."""
        return _tosses(os.urandom(32), size, sample_rate, epoch, first_step)


class SeededCoins(Coins):
    """Reproducible coins, for experiments and tests. They hide nothing from whoever can guess the seed.

    Args:
        seed: Any integer.
        reproducibility_over_privacy: Must be ``True``; says that the batches may be predictable.
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
        return _tosses(key, size, sample_rate, epoch, first_step)


def _tosses(key: bytes, size: int, sample_rate: float, epoch: int, first_step: int) -> Iterator[NDArray[np.intp]]:
    largest = np.uint64(int(sample_rate * 2.0**64) - 1)  # of 2^64 words, floor(q 2^64) are heads
    for step in itertools.count(first_step):
        nonce = bytes(8) + epoch.to_bytes(4, "little") + step.to_bytes(4, "little")  # the first 8 bytes count blocks
        stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
        heads = []
        for start in range(0, size, _CHUNK):
            words = np.frombuffer(stream.update(bytes(8 * min(_CHUNK, size - start))), dtype="<u8")
            heads.append(start + np.flatnonzero(words <= largest))
        yield np.concatenate(heads)
