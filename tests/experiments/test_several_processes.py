"""A training run in several processes: one directory, written by the first rank, that any number goes on with."""

import json

import pytest

from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import SettingsError
from spectral_dp.experiments.several_processes import refuse_for_ranks

PROGRAMS = "tests.support.rank_programs:"


def test_a_run_stops_goes_on_with_one_rank_more_and_is_finished(processes, tiny, tmp_path):
    settings, path = tiny(epochs=3, flip=True, augmentation_multiplicity=2), tmp_path / "run"
    for words in processes.run(2, PROGRAMS + "training_run", settings, str(path), 6):
        assert words == "stopped at step 6 of 12"  # only rank 1 was told to
    first, *others = processes.run(3, PROGRAMS + "training_run", settings, str(path), None)
    assert others == [{}, {}]
    assert first["steps"] == 12
    assert first == RunDirectory(path).summary()
    assert [row["step"] for row in RunDirectory(path).metrics()] == [4, 8, 12]
    assert (
        json.loads((path / "privacy.json").read_text())["ledger_head"]
        == RunDirectory(path).metrics()[-1]["ledger_head"]
    )
    assert json.loads((path / "privacy.json").read_text())["processes"] == "2, then 3"
    again = processes.run(2, PROGRAMS + "training_run", settings, str(path), None)
    assert again == [first, {}]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({"method": "nonprivate", "noise_multiplier": None}, "method nonprivate trains in one process"),
        ({"method": "opacus"}, "method opacus trains in one process"),
        ({"model": "scatter-linear", "feature_norm": "private"}, "feature_norm group"),
        ({"unsafe_diagnostics": True}, "of the first process only"),
    ],
)
def test_what_every_rank_would_do_by_itself_is_refused(tiny, others, words):
    with pytest.raises(SettingsError, match=words):
        refuse_for_ranks(tiny(**others))
    refuse_for_ranks(tiny())
