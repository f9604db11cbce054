"""Whole runs in real processes: what is released, the ledger, budgets and checkpoints are those of one process."""

import math

import pytest
import torch
from tests.support import rank_programs
from tests.support.privacy_checks import noise_law_p_values
from tests.support.private_runs import BATCH, N

from spectral_dp import PrivacyEngine
from spectral_dp.accounting import Ledger, epsilon

PROGRAMS = "tests.support.rank_programs:"

#: Every kind of layer, filter and clipping; batches that need several passes on some ranks; shards that draw nothing.
RUNS = {
    "convolution": {"spectral": "convolution"},
    "block-circulant": {"spectral": "block-circulant", "clipping": "per_layer"},
    "dense": {"spectral": "dense", "clipping": "automatic"},
    "transformer": {"clipping": "per_layer", "noise_allocation": "optimal"},
    "physical batches": {"kind": "convolution", "physical": (3, 50, 8)},
    "views": {"kind": "dense", "views": 2},
    "hardly any records": {"kind": "convolution", "records": 7, "batch_size": 2, "steps": 12},
    "fewer records than ranks": {"kind": "convolution", "records": 2, "batch_size": 1, "steps": 6},
}


def asked(name):
    return {"kind": name} | RUNS[name]


def call(name, **options):
    return rank_programs.fixed_run(**(asked(name) | options))


@pytest.fixture(scope="module")
def alone():
    """The weights after each run in one process, which are not those that it began with."""
    made = {name: call(name) for name in RUNS}
    for name, weights in made.items():
        assert not torch.allclose(weights, call(name, steps=0), atol=1e-6)
    return made


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_releases_what_one_process_releases(processes, alone, ranks):
    """In float64, with the noise off and the same coins: the sum over records does not know who added them."""
    for found in processes.run(ranks, PROGRAMS + "fixed_runs", {name: asked(name) for name in RUNS}):
        for name, weights in found.items():
            torch.testing.assert_close(weights, alone[name], rtol=1e-9, atol=1e-12, msg=f"{name}, {ranks} ranks")


def test_negative_control_an_average_is_not_what_one_process_releases(processes, alone):
    for found in processes.run(2, PROGRAMS + "averaging_run", asked("convolution")):
        assert not torch.allclose(found, alone["convolution"], rtol=1e-3)


def test_ranks_stay_equal_with_noise_and_filters_that_learn_from_it(processes):
    options = {"kind": "convolution", "spectral": "adaptive", "noise_multiplier": 1.0, "steps": 12}
    first, second = processes.run(2, PROGRAMS + "fixed_run_by_name", options)
    assert torch.equal(first, second)


@pytest.mark.parametrize("seed", [None, 3])
def test_what_an_engine_releases_has_the_noise_of_one_process(processes, seed):
    """Catches ranks that draw the same noise, whose sum has more of it, and shares of another number of ranks."""
    first, second = processes.run(2, PROGRAMS + "released_noise", seed, 1.3, 0.7)
    assert torch.equal(first, second)
    assert min(noise_law_p_values(first, 1.3 * 0.7)) > 1e-4
    for wrong in (1 / math.sqrt(2), math.sqrt(2)):  # a share alone; the same share twice
        assert min(noise_law_p_values(first, wrong * 1.3 * 0.7)) < 1e-4
    assert first.corrcoef().fill_diagonal_(0).abs().max() < 6 / math.sqrt(first.shape[1])


def test_one_ledger_on_all_ranks(processes):
    (first, ledger, spent), (second, other, _) = processes.run(2, PROGRAMS + "private_run")
    assert torch.equal(first, second)
    assert ledger == other
    assert Ledger.from_state_dict(ledger).steps == 2 * N // BATCH
    assert spent == pytest.approx(epsilon(1.0, BATCH / N, 2 * N // BATCH, 1e-3), rel=1e-9)


@pytest.mark.parametrize(
    ("differ", "words"),
    [
        ({"noise_multiplier": 1.1}, "rank 1: noise_multiplier 1.1, but on rank 0 1.0"),
        ({"max_grad_norm": 2.0}, "rank 1: clipping 'FlatClipping(max_norm=2.0)'"),
        ({"dataset": rank_programs.task(N + 1)}, f"rank 1: records {N + 1}, but on rank 0 {N}"),
        ({"lr": 0.2}, "rank 1: hyperparameters [('lr', 0.2)"),
    ],
)
def test_a_rank_with_other_settings_is_named_before_anything_is_released(processes, differ, words):
    for error in processes.results(2, PROGRAMS + "private_run", differ):
        assert error.kind == "RanksError"
        assert words in error.message


def test_drift_is_an_error(processes):
    for error in processes.results(2, PROGRAMS + "drifting_run"):
        assert "rank 1: parameters" in error.message


def test_a_budget_stops_all_ranks_at_the_same_step(processes):
    (sigma, steps, spent), other = processes.run(2, PROGRAMS + "run_within_a_budget")
    assert (sigma, steps, spent) == other
    assert 2 * N // BATCH <= steps < 4 * N // BATCH
    assert spent <= 3.0


@pytest.mark.parametrize(
    "differ", [{"target_epsilon": 1.0}, {"target_delta": 1e-4}, {"epochs": 4}, {"stop_at_budget": False}]
)
def test_a_rank_with_another_budget_is_refused(processes, differ):
    """The first rank calibrates the noise for all: it would be too little for a rank that asked for less."""
    for error in processes.results(2, PROGRAMS + "run_within_a_budget", differ):
        assert "at make_private_with_epsilon the ranks differ" in error.message


def test_a_run_goes_on_with_another_number_of_ranks(processes, tmp_path):
    """Two ranks, then three, then one. The ledger continues, the batches are those of the seed."""
    path = str(tmp_path / "run.pt")
    processes.run(2, PROGRAMS + "resumed_run", path, 4, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    found = processes.run(3, PROGRAMS + "resumed_run", path, 9, 9)
    for weights, ledger, _ in found:
        assert torch.equal(weights, found[0][0])
        assert ledger == found[0][1]
    last, ledger, spent = rank_programs.resumed_run(path, 12)
    whole = Ledger.from_state_dict(ledger)
    assert whole.continues(Ledger.from_state_dict(found[0][1]))
    assert whole.steps == 12
    assert not torch.equal(last, found[0][0])
    assert spent == pytest.approx(epsilon(1.0, BATCH / N, 12, 1e-3), rel=1e-9)


def test_an_interruption_does_not_change_a_reproducible_run(processes, tmp_path):
    path = str(tmp_path / "run.pt")
    whole = processes.run(2, PROGRAMS + "resumed_run", str(tmp_path / "none.pt"), 9)
    processes.run(2, PROGRAMS + "resumed_run", path, 5, 5)
    resumed = processes.run(2, PROGRAMS + "resumed_run", path, 9)
    assert torch.equal(whole[0][0], resumed[0][0])


def test_ranks_that_part_keep_ledgers_of_their_own(processes, tmp_path):
    """Rank 0 made a step by itself that is missing in the longer ledger of rank 1: it must not be forgotten."""
    first, second = processes.results(2, PROGRAMS + "parting", str(tmp_path / "run.pt"))
    assert second is None
    assert first.kind == "CheckpointError"
    assert "both continued the same run, each by itself" in first.message


def test_a_run_that_was_made_private_before_there_was_a_group_releases_nothing_in_it(processes, tmp_path):
    """Each rank would train a model of its own on all records."""
    for words, is_unchanged in processes.run(2, PROGRAMS + "group_after_make_private", str(tmp_path / "store")):
        assert "were made private one by one" in words
        assert is_unchanged


def test_a_checkpoint_that_is_not_there_is_an_error_on_all_ranks(processes, tmp_path):
    first, second = processes.results(2, PROGRAMS + "loading_what_is_not_there", str(tmp_path / "none.pt"))
    assert first.kind == "FileNotFoundError"
    assert second.message.startswith("load_checkpoint failed on rank 0: FileNotFoundError")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("ddp", "give make_private the module that it wraps (model.module)"),
        ("fsdp", "which must fit into each process"),
        ("sampler", "a DistributedSampler would choose the records of each process a second time"),
        ("no sampling", "poisson_sampling=True only"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_to_write_instead(processes, what, words):
    for error in processes.results(2, PROGRAMS + "refused_setup", what):
        assert error.kind == "ValueError"
        assert words in error.message


def test_one_of_several_processes_without_a_group_is_refused(monkeypatch):
    """Under torchrun, but init_process_group was forgotten: each would spend a budget of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="before make_private"):
        rank_programs.setup(engine=PrivacyEngine())
