"""Searches whose trials are real training runs of a second, in this process."""

import pytest

from spectral_dp.experiments import trainer
from spectral_dp.experiments.processes import RunsFailed, RunsProgress
from spectral_dp.experiments.run_directory import RunDirectory


@pytest.fixture
def given():
    """The settings of a search that are not searched."""
    return {
        "model": "tiny",
        "train_size": 200,
        "validation_size": 397,  # a prime: no accuracy on them is a rounder number by chance
        "batch_size": 50,
        "epochs": 1,
        "accountant": "rdp",
        "delta": 1e-4,
    }


class Runner:
    """Runs trials here, as ``run_all`` does in processes of their own.

    Attributes:
        started: The names of all trials that were started, in order.
        fail: Names of trials that fail, with their exit codes.
        stop_after: After so many trials, the search is interrupted.
    """

    def __init__(self):
        self.started, self.fail, self.stop_after = [], {}, None

    def __call__(self, runs, root, *, jobs, show, failed=lambda name, code: None):
        for name, settings in runs.items():
            if len(self.started) == self.stop_after:
                raise KeyboardInterrupt
            directory = RunDirectory(root / name)
            if directory.holds_result_of(settings):
                continue
            self.started.append(name)
            if name in self.fail:
                failed(name, self.fail[name])
                continue
            trainer.run(settings, directory, resume=True)
            show(RunsProgress(0, len(runs), {name: 1.0}))
        if self.fail:
            raise RunsFailed("some failed")


@pytest.fixture
def runner():
    return Runner()
