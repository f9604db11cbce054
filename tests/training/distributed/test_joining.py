"""A run begins with the same model, settings and ledger on all ranks, and drift between them is noticed."""

import pytest
import torch
from tests.support.private_runs import setup

from spectral_dp.accounting import Ledger
from spectral_dp.training.distributed.joining import COMPARED_EVERY, release_facts

PROGRAMS = "tests.support.rank_programs:"


def test_all_ranks_begin_with_the_model_of_the_first(processes):
    first, second = processes.run(2, PROGRAMS + "model_of_rank")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert second["seen"] == 0


def test_other_models_are_refused(processes):
    for error in processes.results(2, PROGRAMS + "model_of_rank", "shape"):
        assert "rank 1: 0.weight ((4, 3), 'torch.float32', True), but on rank 0 ((5, 3)" in error.message


def test_all_ranks_stop_if_one_must(processes):
    assert processes.run(2, PROGRAMS + "stopping") == [3, 3]


def facts(drift=0.0, step=0, rate=0.1, records=0):
    _, model, _, _ = setup()
    with torch.no_grad():
        model[0].bias[0] += drift
    ledger = Ledger()
    ledger.sign_as(("00" * 16, "00" * 8))
    for _ in range(records):
        ledger.record(1.0, 0.1)
    return release_facts(dict(model.named_parameters()), ledger, step, [("lr", rate)])


@pytest.mark.parametrize("change", [{"rate": 0.2}, {"step": 1}, {"records": 1}, {"drift": 1e-6}])
def test_what_differs_between_ranks_differs_in_the_facts(change):
    assert facts() == facts()
    assert facts() != facts(**change)


def test_parameters_are_compared_now_and_then():
    """Not at every step: a digest of a large model takes as long as a step."""
    assert all("parameters" in facts(step=step) for step in (1, 2, 4, 64, COMPARED_EVERY, 3 * COMPARED_EVERY))
    assert facts(step=3) == facts(step=3, drift=1e-6)


def test_a_release_beside_training_is_refused_on_every_rank_and_nothing_is_charged(processes):
    for words, charged in processes.run(2, PROGRAMS + "release_beside_training"):
        assert "these 2 processes would make this release" in words
        assert charged == 0
