"""Many runs behind one progress bar: how they end is an exit code, and what is said goes to stderr."""

import pytest

from spectral_dp.cli.progress import INTERRUPTED, progress_bar, run_all
from spectral_dp.experiments import processes


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (None, 0, ""),
        (KeyboardInterrupt(), INTERRUPTED, "stopped; the same command goes on"),
        (processes.RunsFailed("one of two runs failed"), 1, "error: one of two runs failed"),
    ],
)
def test_how_runs_end_is_an_exit_code(tmp_path, monkeypatch, capsys, ending, code, said):
    asked = []

    def make_runs(runs, root, *, jobs, show):
        asked.append((runs, root, jobs))
        show(processes.RunsProgress(total=2, finished=1, running={"a": 0.5}))
        if ending is not None:
            raise ending

    monkeypatch.setattr(processes, "run_all", make_runs)
    assert run_all({"a": None}, tmp_path, 3, to_go_on="the same command") == code
    assert asked == [({"a": None}, tmp_path, 3)]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "training" in captured.err


def test_a_bar_shows_what_it_is_told(capsys):
    with progress_bar("fetching", "files") as update:
        update(total=4, completed=1, facts="mnist")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "fetching" in captured.err
    assert "1/4 files" in captured.err
    assert "mnist" in captured.err
