"""From settings and seeds to runs, and back from what is finished; no run is made or counted twice."""

from dataclasses import replace

import pytest
from tests.support.fabricated_runs import fabricate

from spectral_dp.data import DataError
from spectral_dp.experiments.grid import Grid, check_data, run_name
from spectral_dp.experiments.settings import Settings


def settings(**given):
    return Settings(**{"epsilon": 2} | given).resolved()


@pytest.fixture
def finish(tmp_path):
    """Puts a finished run where a grid looks for it."""

    def finish(settings, name=None):
        return fabricate(tmp_path / (name or run_name(settings)), **settings.to_dict())

    return finish


class TestNames:
    def test_a_name_says_what_it_is(self):
        name = run_name(replace(settings(epsilon=0.5, seed=3), model="my.models:net"))
        assert name.startswith("digits-my.models.net-spectral-eps0.5-")
        assert name.endswith("-seed3")

    def test_a_name_changes_with_what_is_computed(self):
        assert run_name(settings()) != run_name(settings(momentum=0.9))
        assert run_name(settings()) == run_name(settings(threads=2, max_physical_batch_size=8))

    def test_a_name_outlives_new_settings(self):
        """Finished runs would be lost if the digest covered every setting: it covers those not at their defaults."""
        assert run_name(settings()) == "digits-model1-spectral-eps2-ed40cbcc67-seed0"


class TestGrid:
    def test_every_distinct_run_with_every_seed(self):
        grid = Grid({"a": settings(), "b": settings(method="dpsgd"), "the same as a": settings(threads=3)}, [1, 2])
        runs = grid.runs()
        assert [(run.method, run.seed) for run in runs.values()] == [
            (m, s) for s in (1, 2) for m in ("spectral", "dpsgd")
        ]
        assert all(run_name(run) == name for name, run in runs.items())

    def test_what_is_finished_is_read_back_by_place(self, finish, tmp_path):
        grid = Grid({"a": settings(), "b": settings(method="dpsgd")}, [0, 1])
        for run in list(grid.runs().values())[:3]:
            finish(run)
        found = grid.results(tmp_path)
        assert {place: [run.settings.seed for run in result.runs] for place, result in found.items()} == {
            "a": [0, 1],
            "b": [0],
        }

    def test_a_seed_counted_twice_makes_no_interval_narrower(self, finish, tmp_path):
        finish(settings(seed=1))
        assert len(Grid({"a": settings()}, [1, 1]).results(tmp_path)["a"].runs) == 1

    def test_a_run_with_other_settings_is_not_counted(self, finish, tmp_path):
        """Catches a result that believes the name of a directory."""
        finish(settings(momentum=0.9), name=run_name(settings()))
        assert not Grid({"a": settings()}, [0]).results(tmp_path)["a"].runs

    def test_where_it_was_computed_does_not_matter(self, finish, tmp_path):
        finish(settings(threads=7))
        assert Grid({"a": settings()}, [0]).results(tmp_path)["a"].runs


class TestMissing:
    def test_what_no_directory_holds(self, finish, tmp_path):
        grid = Grid({"a": settings(), "b": settings(method="dpsgd")}, [0, 1])
        first, second, *others = grid.runs().values()
        finish(first, name=f"here/{run_name(first)}")
        finish(second, name=f"there/{run_name(second)}")
        assert list(grid.missing(tmp_path / "here", tmp_path / "there").values()) == others
        assert list(grid.missing(tmp_path / "there").values()) == [first, *others]

    def test_a_result_of_other_settings_is_none(self, finish, tmp_path):
        """Catches a run that is never made, because a directory has its name."""
        finish(settings(momentum=0.9), name=run_name(settings()))
        assert len(Grid({"a": settings()}, [0]).missing(tmp_path)) == 1


def test_missing_data_are_found_before_anything_runs(tmp_path, monkeypatch, finish):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))
    grid = Grid({"a": settings(dataset="mnist")}, [0, 1])
    with pytest.raises(DataError, match="spectral-dp data get mnist"):
        check_data(grid.missing(tmp_path))
    for run in grid.runs().values():
        finish(run)
    check_data(grid.missing(tmp_path))  # nothing left to train, no data needed
