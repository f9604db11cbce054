"""Runs that differ in their seed only: figures of all of them, and a label that tells them from others."""

import pytest
from tests.support.fabricated_runs import fabricate

from spectral_dp.experiments.recorded_run import RecordedRun
from spectral_dp.experiments.results import Result, ResultTable, differing, group_by_settings


@pytest.fixture
def grouped(tmp_path):
    """Groups fabricated runs, given as settings; returns how many runs are under each label."""

    def group(*runs):
        read = [RecordedRun.read(fabricate(tmp_path / str(i), **given)) for i, given in enumerate(runs)]
        return {group.label: len(group.runs) for group in group_by_settings(read)}

    return group


class TestResult:
    def test_over_seeds(self, tmp_path):
        runs = [fabricate(tmp_path / str(i), accuracy=a, evaluated=2 + i, seed=i) for i, a in enumerate((0.9, 0.92))]
        result = Result([RecordedRun.read(run) for run in runs])
        assert result.mean == pytest.approx(0.91)
        assert result.accuracy_text() == "91.00 ± 1.41"
        assert (result.largest("epsilon"), result.epsilon_text()) == (1.5, "1.5")  # the most that one of them spent

    def test_of_one_run_and_of_none(self, tmp_path):
        one, none = Result([RecordedRun.read(fabricate(tmp_path / "run", method="nonprivate"))]), Result([])
        assert (one.deviation, one.accuracy_text(), one.epsilon_text()) == (None, "56.00", "")
        assert (none.mean, none.deviation, none.accuracy_text(), none.epsilon_text()) == (None, None, "", "")


def test_bars_in_a_table_are_escaped():
    assert ResultTable(["a", "b"], [["x | y", ""]]).markdown() == "| a | b |\n|---|---|\n| x \\| y |  |"


class TestGroups:
    def test_runs_that_differ_in_their_seed_belong_together(self, grouped):
        assert grouped({"seed": 1}, {"seed": 2}, {"method": "dpsgd"}) == {"spectral": 2, "dpsgd": 1}

    def test_finished_and_unfinished_runs_do_not(self, grouped):
        names = "spectral, model1, digits"
        assert grouped({}, {"seed": 1, "is_finished": False}) == {names: 1, f"{names} (unfinished)": 1}

    def test_labels_name_what_differs_and_no_more(self, grouped):
        noise = {"epsilon": None, "noise_multiplier": 1.5}
        labels = grouped({"epsilon": 1.0}, {"epsilon": 2.0}, noise, {"method": "dpsgd", "momentum": 0.5})
        assert list(labels) == [
            "spectral, epsilon 1",
            "spectral, epsilon 2",
            "spectral, noise multiplier 1.5",
            "dpsgd",
        ]

    def test_every_label_is_another(self, grouped):
        """Catches labels by what is set alone: a setting may differ by not being there."""
        labels = grouped({}, {"train_size": 100}, {"test_size": 100}, {"train_size": 100, "test_size": 100})
        assert len(labels) == 4

    def test_what_differs(self):
        assert differing([{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3, "c": 0}]) == ["b", "c"]
