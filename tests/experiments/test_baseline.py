"""Accuracy beside DP-SGD: the same data, network and budget, or nothing."""

import pytest
from tests.support.fabricated_runs import fabricate

from spectral_dp.experiments.baseline import beside_dpsgd
from spectral_dp.experiments.recorded_run import RecordedRun
from spectral_dp.experiments.results import group_by_settings


def groups(path, *runs):
    made = [fabricate(path / str(number), **settings) for number, settings in enumerate(runs)]
    return group_by_settings(RecordedRun.read(run) for run in made)


def run(method, accuracy, **settings):
    return {"method": method, "accuracy": accuracy, **settings}


def test_the_difference_is_paired_over_seeds(tmp_path):
    ours = [run("spectral", accuracy, conv_ratio=0.5, seed=seed) for seed, accuracy in enumerate((0.90, 0.92, 0.94))]
    theirs = [run("dpsgd", accuracy, seed=seed) for seed, accuracy in enumerate((0.88, 0.90, 0.91, 0.10))]
    spectral, dpsgd = found = groups(tmp_path, *ours, *theirs)
    assert "; difference +2.33 [" in beside_dpsgd(spectral, found)  # the fourth seed of DP-SGD has no partner
    assert beside_dpsgd(dpsgd, found) == ""


def test_ours_comes_before_that_of_opacus(tmp_path):
    found = groups(tmp_path, run("opacus", 0.7), run("dpsgd", 0.8), run("spectral", 0.9))
    assert beside_dpsgd(found[2], found) == "80.00 %; difference +10.00"
    assert beside_dpsgd(found[0], found) == "80.00 %; difference -10.00"
    assert beside_dpsgd(found[2], [found[0], found[2]]) == "70.00 %; difference +20.00"


@pytest.mark.parametrize(
    "other",
    [
        {"model": "lenet5"},
        {"features": "pixels"},
        {"dataset": "mnist"},
        {"validation_size": 100},
        {"delta": 1e-6},
        {"evaluated": 4},  # spends more
        {"is_finished": False},
        {"method": "nonprivate"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_what_is_not_comparable_is_not_compared(tmp_path, other):
    found = groups(tmp_path, run("dpsgd", 0.8) | other, run("spectral", 0.9))
    assert beside_dpsgd(found[1], found) == ""
