import json

import pytest

from spectral_dp.experiments.settings import SettingsError
from spectral_dp.experiments.tuning.open_search import STATEMENTS, run_open_search, searched_values
from spectral_dp.experiments.tuning.space import SearchSpace, parse_dimensions

SPACE = SearchSpace(tuple(parse_dimensions(["learning_rate=0.01..2:log", "layer_ratios.fc1=0.25,0.5"])))
SEARCHED = ["learning_rate", "layer_ratios.fc1"]


@pytest.fixture
def candidates(given):
    return SPACE.candidates(given | {"noise_multiplier": 2.0, "reproducible": True}, 3)


@pytest.mark.parametrize("records", ["public", "private"])
def test_the_report_says_that_it_is_not_accounted_for(tmp_path, candidates, runner, records):
    report = run_open_search(candidates[:1], SEARCHED, tmp_path, records=records, run=runner)
    assert report["way"] == "not accounted"
    assert STATEMENTS[records] in (tmp_path / "tune.md").read_text()
    assert json.loads((tmp_path / "tune.json").read_text())["statement"].startswith("NOT ACCOUNTED")


def test_trials_are_ranked_and_the_best_can_be_trained(tmp_path, candidates, runner):
    report = run_open_search(candidates, SEARCHED, tmp_path, records="public", run=runner)
    accuracies = [line["heldout_accuracy"] for line in report["ranking"]]
    assert accuracies == sorted(accuracies, reverse=True)
    assert len(accuracies) == 3
    best = json.loads((tmp_path / "best.json").read_text())
    assert best["learning_rate"] == report["ranking"][0]["settings"]["learning_rate"]
    assert best["validation_size"] == 0
    runner.started.clear()
    assert run_open_search(candidates, SEARCHED, tmp_path, records="public", run=runner)["ranking"] == report["ranking"]
    assert runner.started == []


def test_it_stops_at_the_time_that_was_said(tmp_path, candidates, runner):
    report = run_open_search(candidates, SEARCHED, tmp_path, records="public", seconds=0.0, run=runner)
    assert report["finished"] == 1
    assert "as was said in advance" in report["stopped"]


def test_failures_are_told(tmp_path, candidates, runner):
    runner.fail = {"trial-001": 1}
    report = run_open_search(candidates, SEARCHED, tmp_path, records="public", run=runner)
    assert (report["finished"], report["failed"]) == (2, "some failed")
    runner.fail = {"trial-000": 1}
    with pytest.raises(SettingsError, match="no trial of this search is finished: some failed"):
        run_open_search(candidates[:1], SEARCHED, tmp_path / "other", records="public", run=runner)


def test_settings_are_not_chosen_on_the_test_set(tmp_path, given, runner):
    candidates = SPACE.candidates(given | {"validation_size": 0}, 2)
    with pytest.raises(SettingsError, match="not chosen on the test set"):
        run_open_search(candidates, SEARCHED, tmp_path, records="public", run=runner)


def test_values_of_parts(candidates):
    values = searched_values(candidates[0], SEARCHED)
    assert set(values) == set(SEARCHED)
    assert values["layer_ratios.fc1"] in (0.25, 0.5)
