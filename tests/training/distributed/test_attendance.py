"""Who is named after a failure: the rank that said why it ended, or did not arrive, or says nothing more."""

import pytest
from torch.distributed import HashStore

from spectral_dp.training.distributed import attendance
from spectral_dp.training.distributed.attendance import Attendance


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(attendance, "GRACE", 0.1)


def three_ranks():
    store = HashStore()
    return [Attendance(store, rank, 3) for rank in range(3)]


def test_the_rank_that_did_not_arrive_is_named_with_where_it_was_last():
    first, second, third = three_ranks()
    for each in (first, second, third):
        each.arrive("a release")
    first.arrive("the sum over ranks")
    third.arrive("the sum over ranks")
    for survivor in (first, third):
        assert survivor.explanation().startswith("rank 1 (last seen at a release) did not arrive")


def test_a_rank_that_never_came_is_named():
    first, _, third = three_ranks()
    first.arrive("a release")
    third.arrive("a release")
    assert first.explanation().startswith("rank 1 (never seen)")


def test_the_words_of_a_rank_are_quoted():
    first, second, _ = three_ranks()
    first.arrive("a release")
    second.tell("ZeroDivisionError: division by zero")
    assert first.explanation() == "rank 1 ended with ZeroDivisionError: division by zero"


def test_a_rank_that_is_lost_within_the_operation_is_the_one_that_does_not_notice():
    first, second, third = three_ranks()
    for each in (first, second, third):
        each.arrive("the sum over ranks")
    first.explanation()
    assert third.explanation().startswith("rank 1 was lost during the operation")


def test_if_all_notice_it_was_the_network():
    ranks = three_ranks()
    for each in ranks:
        each.arrive("the sum over ranks")
    for each in ranks[:2]:
        each.explanation()
    assert "network" in ranks[2].explanation()


def test_a_store_that_is_gone_is_an_explanation_too():
    class Gone:
        def set(self, *_):
            raise ConnectionError

    first = three_ranks()[0]
    first._store = Gone()
    assert "store of the group cannot be reached" in first.explanation()
