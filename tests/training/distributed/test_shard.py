"""Shards are disjoint and complete, and what all ranks draw together is a Poisson sample of all records."""

import itertools

import numpy as np
import pytest
import torch
from tests.support.group_doubles import AtTheRateOfAll, OfAllRecords
from tests.support.poisson import poisson_p_values, table
from torch.utils.data import TensorDataset

from spectral_dp.training.coins import Coins, SecureCoins, SeededCoins
from spectral_dp.training.distributed.shard import ShardCoins
from spectral_dp.training.sampling import PoissonLoader

ALPHA = 1e-5  # the coins are secret: one false alarm in thousands of runs
N, Q, STEPS = 301, 0.1, 600


def of_all_ranks(ranks, make, size=N, steps=STEPS):
    """The records that loaders of all ranks draw at each step, together; each rank has coins of its own."""
    batches = [[] for _ in range(steps)]
    for rank in range(ranks):
        loader = PoissonLoader(TensorDataset(torch.arange(size)), batch_size=size * Q, coins=make(rank, ranks))
        drawn = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch, (x,) in zip(batches, drawn, strict=False):
            batch.extend(x.tolist())
    return batches


def secret(rank, ranks):
    return ShardCoins(SecureCoins(), rank, ranks)


def first_of(coins, size, rate=1.0):
    return next(coins.tosses(size, rate, 0, 0))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 6, 100])
def test_each_record_is_in_one_shard(ranks, size):
    """Also if there are more ranks than records, and if their number does not divide that of the records."""
    shards = [first_of(secret(rank, ranks), size) for rank in range(ranks)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(size))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_together_draw_a_poisson_sample(ranks):
    p_values = poisson_p_values(table(of_all_ranks(ranks, secret), N), Q)
    assert min(p_values.values()) > ALPHA / len(p_values), p_values


class WithAKeyOfAll(ShardCoins):
    """The ranks share one key, so that records of different shards have the same coins."""

    def tosses(self, size, sample_rate, epoch, first_step):
        own = len(range(self.rank, size, self.size))
        alike = SeededCoins(5, reproducibility_over_privacy=True).tosses(own, sample_rate, epoch, first_step)
        return (self.rank + self.size * drawn for drawn in alike)


@pytest.mark.parametrize("mistake", [OfAllRecords, AtTheRateOfAll, WithAKeyOfAll])
def test_negative_control_other_laws_are_seen(mistake):
    drawn = table(of_all_ranks(2, lambda rank, ranks: mistake(SecureCoins(), rank, ranks)), N)
    p_values = poisson_p_values(drawn, Q)
    assert min(p_values.values()) < ALPHA / len(p_values), p_values


def test_seeded_batches_are_those_of_one_process():
    alone = SeededCoins(3, reproducibility_over_privacy=True)
    whole = [sorted(batch) for batch in of_all_ranks(1, lambda *_: alone, steps=30)]
    for ranks in (2, 3):
        parts = of_all_ranks(ranks, lambda rank, ranks: ShardCoins(alone, rank, ranks), steps=30)
        assert [sorted(batch) for batch in parts] == whole


def test_the_loader_of_a_rank_has_the_public_numbers_of_the_whole_run():
    loader = PoissonLoader(TensorDataset(torch.arange(100.0)), batch_size=40, coins=secret(1, 2))
    assert (loader.sample_rate, loader.expected_batch_size, len(loader)) == (0.4, 40, 3)
    assert loader.may_be_empty  # 20 are expected here
    assert not PoissonLoader(TensorDataset(torch.arange(100.0)), batch_size=40).may_be_empty


@pytest.mark.parametrize("seeded", [False, True])
def test_a_shard_tells_whether_it_can_be_predicted(seeded):
    coins: Coins = SeededCoins(3, reproducibility_over_privacy=True) if seeded else SecureCoins()
    shard = ShardCoins(coins, 0, 2)
    assert (shard.is_private, shard.seed, shard.share) == (not seeded, 3 if seeded else None, 0.5)


def test_there_is_no_rank_beyond_the_last():
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        secret(2, 2)
