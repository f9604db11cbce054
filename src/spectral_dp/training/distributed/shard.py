"""The shard of a rank: the records whose coins it tosses. The shards are disjoint and together hold all records."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from spectral_dp.training.coins import Coins


class ShardCoins(Coins):
    """Tosses the coins of every ``size``-th record, beginning with record ``rank``.

    Formal guarantee. The records that all ranks draw for a step are a Poisson sample of all records, at the same rate:

    * Each record is in the shard of exactly one rank, so exactly one coin is tossed for it, at the rate of the run.
    * Unpredictable coins of different ranks are independent, because each rank has a key of its own, which it shares
      with nobody. A union of independent Poisson samples of disjoint shards is a Poisson sample of their union.
    * Seeded coins are the same as in one process: every rank tosses all of them and keeps those of its shard. So a
      reproducible run has the same batches with any number of ranks.

    Args:
        coins: The coins of this rank.
        rank: The number of this rank, from 0.
        size: The number of ranks.
    """

    def __init__(self, coins: Coins, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"there is no rank {rank} of {size}: ranks are numbered from 0")
        self.coins, self.rank, self.size = coins, rank, size
        self.is_private, self.seed, self.share = coins.is_private, coins.seed, 1 / size

    def tosses(self, size: int, sample_rate: float, epoch: int, first_step: int) -> Iterator[NDArray[np.intp]]:
        """Yields the indices, among all ``size`` records, of those of this shard that take part in each step."""
        if self.seed is not None:
            for drawn in self.coins.tosses(size, sample_rate, epoch, first_step):
                yield drawn[drawn % self.size == self.rank]
        own = len(range(self.rank, size, self.size))
        while not own:  # fewer records than ranks: nothing is ever drawn here
            yield np.empty(0, dtype=np.intp)
        for drawn in self.coins.tosses(own, sample_rate, epoch, first_step):
            yield self.rank + self.size * drawn
