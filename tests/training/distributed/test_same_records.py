"""Ranks that list other records, or the same ones in another order, are refused: a record would be in two shards."""

import numpy as np
import pytest
import torch
from tests.support.private_runs import N, task
from tests.support.rank_programs import Noisy
from torch.utils.data import Subset

from spectral_dp.training.coins import SecureCoins
from spectral_dp.training.distributed.same_records import COMPARED, digest_of_records
from spectral_dp.training.distributed.shard import ShardCoins

PROGRAMS = "tests.support.rank_programs:"
KEY = bytes(16)


def digest(records, key=KEY):
    return digest_of_records(len(records), lambda chosen: [records[i] for i in chosen], key)


def in_another_order(dataset=None):
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    return Subset(dataset or task(), order.tolist())


def shifted():
    """One record is missing near the beginning, and another is there at the end."""
    return Subset(task(N + 1), [i for i in range(N + 1) if i != 3])


@pytest.mark.parametrize("other", [in_another_order, shifted, lambda: task(seed=1)])
def test_other_records_or_another_order_on_one_rank_are_refused(processes, other):
    for error in processes.results(2, PROGRAMS + "private_run", {"dataset": other(), "rehearsal": False}):
        assert error.kind == "RanksError"
        assert "all ranks list the same ones in the same order" in error.message
        assert "rank 1: digest of some of them" in error.message


def test_negative_control_in_another_order_a_record_is_in_two_shards():
    drawn = [next(ShardCoins(SecureCoins(), rank, 2).tosses(N, 1.0, 0, 0)) for rank in range(2)]
    order = np.array(in_another_order().indices)
    assert set(drawn[0]) & set(order[drawn[1]])
    assert not set(drawn[0]) & set(drawn[1])


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "a generator of its own"])
def test_records_that_are_augmented_at_random_are_accepted(processes, own):
    processes.run(2, PROGRAMS + "private_run", None, 1, {"dataset": Noisy(own), "rehearsal": False})


@pytest.mark.parametrize("own", [False, True], ids=["global generator", "a generator of its own"])
def test_augmented_records_in_another_order_are_refused_too(processes, own):
    """The content of records that differ at every reading cannot be compared, but what a Subset chooses can."""
    other = {"dataset": in_another_order(Noisy(own))}
    for error in processes.results(2, PROGRAMS + "private_run", other, 1, {"dataset": Noisy(own), "rehearsal": False}):
        assert "digest of their indices" in error.message
        assert ("digest of some of them" in error.message) == (not own)


RECORDS = {
    "tensors": lambda i: (torch.tensor([i]).bfloat16(), torch.tensor(0)),
    "arrays": lambda i: {"x": np.array([i]), "y": 0},
    "texts": lambda i: {"text": f"number {i}", "tokens": [[1], [i]]},
    "numbers": lambda i: [i, None],
}


@pytest.mark.parametrize("make", RECORDS.values(), ids=RECORDS)
def test_the_digest_tells_records_apart(make):
    records = [make(i) for i in range(7)]
    assert digest(records) == digest([make(i) for i in range(7)])
    assert digest(records) != digest(records[::-1])
    assert digest(records) != digest([*records[:6], make(8)])
    assert digest(records) != digest(records, b"another key")


def test_records_of_the_whole_dataset_are_read():
    asked = []
    digest_of_records(10**6, lambda chosen: asked.extend(chosen) or [], KEY)
    assert (len(asked), asked[0], asked[-1]) == (COMPARED, 0, 10**6 - 1)
    digest_of_records(1, lambda chosen: asked.extend(chosen) or [], KEY)
    assert asked[-1] == 0


def test_objects_that_cannot_be_read_do_not_count():
    """Their addresses differ between processes."""
    assert digest([object()]) == digest([object()])
    assert digest([np.array([object()])]) == digest([np.array([object()])])


def test_reading_leaves_the_generators_as_they_were():
    before = torch.get_rng_state()
    digest(Noisy(False))
    assert torch.equal(torch.get_rng_state(), before)
