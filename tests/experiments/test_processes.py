import os
import subprocess
import sys

import pytest
from tests.support.fabricated_runs import fabricate

from spectral_dp.experiments.processes import RunsFailed, run_all
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import Settings

NETWORK = """
from torch import nn
def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    (tmp_path / "processes_test_network.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return {
        "model": "processes_test_network:net",
        "train_size": 100,
        "batch_size": 20,
        "epochs": 1,
        "noise_multiplier": 1.0,
    }


def test_runs_in_processes_of_their_own_and_a_failure_costs_no_other(tmp_path, small):
    asked = {"good": Settings(**small).resolved(), "bad": Settings(**small | {"batch_size": 1000}).resolved()}
    with pytest.raises(RunsFailed, match="1 of 2 runs failed, the others are kept:\n  - bad: error: batch_size 1000"):
        run_all(asked, tmp_path / "root", jobs=2)
    assert RunDirectory(tmp_path / "root" / "good").summary()["steps"] == 5


def test_finished_runs_are_not_started_again(tmp_path):
    settings = Settings(model="model1", epsilon=2.0).resolved()
    fabricate(tmp_path / "done", **settings.to_dict())
    started = []

    def finish(settings, directory, log, threads):
        started.append(directory.path.name)
        fabricate(directory.path, **settings.to_dict())
        return subprocess.Popen([sys.executable, "-c", ""])

    shown = []
    asked = {"done": settings, "new": settings}
    run_all(asked, tmp_path, show=shown.append, start=finish)
    assert started == ["new"]
    assert (shown[-1].finished, shown[-1].total, shown[-1].running) == (2, 2, {})


def test_stopping_stops_the_processes_and_waits_for_them(tmp_path):
    """Catches runs that go on in the background after Ctrl-C, or are killed before they have saved."""
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
        "print('ready', flush=True); time.sleep(60)"
    )
    processes = []

    def start(*_):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        process.stdout.readline()
        processes.append(process)
        return process

    def interrupt(progress):
        raise KeyboardInterrupt

    asked = {"a": Settings().resolved(), "b": Settings(seed=1).resolved()}
    with pytest.raises(KeyboardInterrupt):
        run_all(asked, tmp_path, jobs=2, show=interrupt, start=start)
    assert [process.returncode for process in processes] == [0, 0]
    for process in processes:
        process.stdout.close()


def test_cores_are_shared_out(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(os, "cpu_count", lambda: 8)

    def start(settings, directory, log, threads):
        given.append(threads)
        return subprocess.Popen([sys.executable, "-c", ""])

    run_all({"a": Settings().resolved()}, tmp_path, jobs=2, start=start)
    assert given == [4]
