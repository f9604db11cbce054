"""A rank that is lost in the middle of a run: the others name it in time, and nothing that is unlisted was released."""

import pytest
from tests.support.private_runs import setup
from tests.support.rank_faults import LOST_AT

from spectral_dp import PrivacyEngine

PROGRAMS = "tests.support.rank_faults:"


@pytest.mark.parametrize("when", ["in the loop", "before the all-reduce", "after the all-reduce", "slow"])
def test_a_rank_that_is_lost_in_a_step(processes, tmp_path, when):
    """Killed with SIGKILL, or slower than the timeout of the group, which is three seconds here."""
    path = tmp_path / "run.pt"
    first, second = processes.results(2, PROGRAMS + "unlucky_run", str(path), when, timeout=3.0)
    assert "rank 1" in first["words"]
    assert "Restart all ranks from the last checkpoint" in first["words"]
    assert first["seconds"] < 15
    # A release that the others complete without the lost rank is in the ledger, as is one that was only begun.
    completed = LOST_AT + (when == "after the all-reduce")
    assert first["released"] == completed
    assert first["listed"] == completed + 1
    assert first["unchanged"]
    if when == "slow":  # it gives up, too: the group is broken for all
        assert second["words"]
        assert second["released"] == LOST_AT


def test_the_last_checkpoint_is_whole_and_is_gone_on_with(processes, tmp_path):
    path = tmp_path / "run.pt"
    processes.results(2, PROGRAMS + "unlucky_run", str(path), "before the all-reduce", timeout=3.0)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    engine, model, optimizer, _ = setup(engine=PrivacyEngine(), rehearsal=False)
    engine.load_checkpoint(path=path, module=model)
    assert optimizer.steps == engine.accountant.ledger.steps == LOST_AT
    for rank in processes.run(2, PROGRAMS + "unlucky_run", str(path), "never"):
        assert rank == {"words": "", "released": 2 * LOST_AT, "listed": 2 * LOST_AT}


def test_another_version_is_named(processes):
    for error in processes.results(2, PROGRAMS + "other_version"):
        assert "rank 1: spectral-dp '0.0.0', but on rank 0" in error.message
