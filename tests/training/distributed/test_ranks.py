"""Ranks meet, add and share; and a rank that differs, goes another way or is lost is named on all others."""

import pytest
import torch

from spectral_dp.training.distributed.ranks import current_ranks

PROGRAMS = "tests.support.rank_programs:"


def test_a_meeting_counts_the_ranks_and_passes_flags_on(processes):
    found = processes.run(3, PROGRAMS + "meetings")
    assert found == [(rank, 3, rank == 0, 3, False, [True, False]) for rank in range(3)]


def test_tensors_are_added_and_taken_over(processes):
    for (ones, doubles, empty), matrix, words in processes.run(2, PROGRAMS + "tensors"):
        assert torch.equal(ones, torch.full((2, 3), 3.0))
        assert torch.equal(doubles, torch.arange(4.0).double())
        assert (empty.shape, doubles.dtype) == ((0,), torch.float64)
        assert torch.equal(matrix, torch.zeros(2, 3))
        assert words == {"from": 0}


def test_every_rank_gets_the_values_of_all(processes):
    assert processes.run(3, PROGRAMS + "values_of_all") == [["rank 0", "rank 1", "rank 2"]] * 3


def test_an_error_of_the_first_rank_reaches_all_and_they_can_go_on(processes):
    (own, _), (others, met) = processes.run(2, PROGRAMS + "failing_on_the_first")
    assert own == "FileNotFoundError: no such file"
    assert others == "RanksError: reading failed on rank 0: FileNotFoundError: no such file"
    assert met == 2


def test_ranks_with_other_facts_are_named(processes):
    for words in processes.run(3, PROGRAMS + "differing", "facts"):
        assert "rank 1: noise multiplier 1.2, but on rank 0 1.0" in words[0]
        assert "relation" not in words[0]
        assert words[1] == words[0]  # whoever catches the error gets it again


def test_ranks_that_go_different_ways_are_named(processes):
    for words in processes.run(2, PROGRAMS + "differing", "place"):
        assert "rank 0 is at a release; rank 1 is at load_checkpoint" in words[0]


def test_a_sum_over_other_ranks_than_those_that_met_is_never_returned(processes):
    for error in processes.results(2, PROGRAMS + "others_added"):
        assert error.message.startswith("others were added than the 3 ranks that had met")


def test_a_group_that_is_gone_is_refused(processes):
    for error in processes.results(2, PROGRAMS + "in_a_group_that_is_gone"):
        assert "is gone or replaced" in error.message


@pytest.mark.parametrize(
    "when", ["error", "slow", "after the meeting", pytest.param("before the meeting", marks=pytest.mark.slow)]
)
def test_a_rank_that_is_lost_is_named_in_time(processes, when):
    *survivors, _ = processes.results(3, PROGRAMS + "losing_the_last", when, timeout=1.0)
    for words, seconds in survivors:
        assert "rank 2" in words
        assert ("ended with ValueError: a record that cannot be read" in words) == (when == "error")
        assert seconds < 10
        assert "Restart all ranks from the last checkpoint" in words


def test_a_rank_that_leaves_the_group_is_missed_at_once(processes):
    """Its connections are closed when it leaves, not when it ends, which may be never."""
    words, seconds = processes.results(2, PROGRAMS + "losing_the_last", "left the group", timeout=20.0)[0]
    assert "rank 1 (last seen at a release) did not arrive" in words
    assert seconds < 10


def test_one_process_has_no_ranks():
    assert current_ranks() is None


def test_processes_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group\\(\\) before make_private"):
        current_ranks()
