import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.fabricated_runs import fabricate

from spectral_dp.accounting import Ledger
from spectral_dp.experiments.run_directory import RunDirectory, RunDirectoryError


def begin(run, settings):
    with run.claimed(settings, resume=False):
        run.begin(settings)


def test_a_new_directory_is_made_and_claimed(tmp_path, tiny):
    run = RunDirectory(tmp_path / "a" / "b")
    begin(run, tiny())
    assert run.settings() == tiny()
    assert not run.is_finished


def test_settings_that_were_refused_do_not_bind_the_directory(tmp_path, tiny):
    run = RunDirectory(tmp_path / "run")
    with run.claimed(tiny(epochs=9), resume=False):
        pass  # something failed before the run began
    begin(run, tiny())
    assert run.settings().epochs == 2


def test_a_directory_of_something_else_is_left_alone(tmp_path, tiny):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunDirectoryError, match="is no run"), RunDirectory(tmp_path).claimed(tiny(), resume=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_process_killed_while_it_began_leaves_the_place_free(tmp_path, tiny):
    """Catches a half-written config.json that makes the directory look like somebody else's for ever."""
    run = RunDirectory(tmp_path / "run")
    code = (
        "import sys, time; from pathlib import Path; from spectral_dp.files import whole_file\n"
        "with whole_file(Path(sys.argv[1]) / 'config.json') as file: print('writing', flush=True); time.sleep(60)\n"
    )
    run.path.mkdir()
    with subprocess.Popen([sys.executable, "-c", code, run.path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        with pytest.raises(RunDirectoryError, match="is no run"), run.claimed(tiny(), resume=False):
            pass  # the control: while it lives, the place is taken
        process.kill()
    begin(run, tiny())
    assert sorted(path.name for path in run.path.iterdir()) == [".lock", "config.json"]


def test_other_settings_are_listed(tmp_path, tiny):
    run = RunDirectory(tmp_path / "run")
    begin(run, tiny())
    message = "other settings:\n  - epochs: 2 there, 3 now\n  - seed: 0 there, 1 now"
    with pytest.raises(RunDirectoryError, match=message), run.claimed(tiny(epochs=3, seed=1), resume=True):
        pass


def test_what_does_not_change_the_result_may_differ(tmp_path, tiny):
    run = RunDirectory(tmp_path / "run")
    begin(run, tiny())
    with run.claimed(replace(tiny(), threads=3, max_physical_batch_size=7), resume=True):
        pass


def test_going_on_must_be_asked_for(tmp_path, tiny):
    run = RunDirectory(tmp_path / "run")
    begin(run, tiny())
    with pytest.raises(RunDirectoryError, match=r"unfinished run .*--resume"), run.claimed(tiny(), resume=False):
        pass


def test_two_processes_do_not_share_a_run(tmp_path, tiny):
    run = RunDirectory(tmp_path / "run")
    code = (
        "import sys, json; from spectral_dp.experiments.run_directory import RunDirectory\n"
        "run = RunDirectory(sys.argv[1])\n"
        "with run.claimed(run.settings(), resume=True): pass\n"
    )
    with run.claimed(tiny(), resume=False):
        run.begin(tiny())
        other = subprocess.run([sys.executable, "-c", code, run.path], capture_output=True, text=True)
    assert "another process is training" in other.stderr
    with run.claimed(tiny(), resume=True):  # free again
        pass


def test_an_unwritable_place_is_named(tmp_path, tiny):
    (tmp_path / "file").write_text("")
    run = RunDirectory(tmp_path / "file" / "run")
    with pytest.raises(RunDirectoryError, match="cannot write to"), run.claimed(tiny(), resume=False):
        pass


def test_metrics_survive_a_line_cut_off(tmp_path, tiny):
    run = RunDirectory(tmp_path / "run")
    with run.claimed(tiny(), resume=False):
        run.add_metrics({"step": 1})
        run.add_metrics({"step": 2})
        with run.metrics_file.open("a") as file:
            file.write('{"step": 3, "epsi')
        assert run.metrics() == [{"step": 1}, {"step": 2}]
        assert run.checked_metrics(2, None) == [{"step": 1}, {"step": 2}]
        assert run.metrics_file.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(
    ("checkpoint", "message"), [(None, "its checkpoint is gone"), (1, "its checkpoint is of step 1")]
)
def test_a_checkpoint_that_knows_less_than_was_told_is_refused(tmp_path, tiny, checkpoint, message):
    """Catches a ledger that forgets steps whose results are on the disk."""
    run = RunDirectory(tmp_path / "run")
    begin(run, tiny())
    run.add_metrics({"step": 2})
    with pytest.raises(RunDirectoryError, match=message):
        run.checked_metrics(checkpoint, None)
    assert run.metrics() == [{"step": 2}]


def test_a_checkpoint_of_another_run_is_refused(tmp_path, tiny):
    ledger, other = Ledger(), Ledger()
    run = RunDirectory(tmp_path / "run")
    begin(run, tiny())
    for each in (ledger, other):
        each.record(1.0, 0.1, 2)
    run.add_metrics({"step": 2, "ledger_head": ledger.head})
    for each in (ledger, other):
        each.record(1.0, 0.1, 3)
    assert run.checked_metrics(5, ledger)  # the control
    with pytest.raises(RunDirectoryError, match=f"of another run, {other.identity[:8]}"):
        run.checked_metrics(5, other)


def test_damage_is_named(tmp_path, tiny):
    run = RunDirectory(tmp_path / "run")
    begin(run, tiny())
    with run.claimed(tiny(), resume=True):
        run.metrics_file.write_text("nonsense\n")
        with pytest.raises(RunDirectoryError, match=r"metrics.jsonl is damaged"):
            run.metrics()
        run.metrics_file.write_text('{"a": 1}\n')
        with pytest.raises(RunDirectoryError, match="no evaluation"):
            run.metrics()
        run.summary_file.write_text("[]")
        with pytest.raises(RunDirectoryError, match="it holds a list"):
            run.summary()
        run.summary_file.write_text("{")
        with pytest.raises(RunDirectoryError, match=r"summary.json is damaged"):
            run.summary()
    with pytest.raises(RunDirectoryError, match="holds no run"):
        RunDirectory(tmp_path).settings()
    assert json.loads(run.config.read_text())["epochs"] == 2


class TestRecord:
    def test_it_is_replaced_whole_by_that_of_another_run(self, tmp_path):
        kept = RunDirectory(tmp_path / "records" / "run")
        fabricate(tmp_path / "old", accuracy=0.9).copy_record(kept.path)
        (kept.path / "of-the-old-run").touch()
        new = fabricate(tmp_path / "new", accuracy=0.8)
        new.copy_record(kept.path)
        assert kept.summary()["heldout_accuracy"] == 0.8
        assert not (kept.path / "of-the-old-run").exists()
        assert [path.name for path in kept.path.parent.iterdir()] == ["run"]

    def test_one_that_is_there_already_is_not_touched(self, tmp_path):
        """Otherwise a kill at the wrong moment would lose it."""
        run, kept = fabricate(tmp_path / "run"), tmp_path / "records" / "run"
        run.copy_record(kept)
        before = kept.stat().st_ino
        run.copy_record(kept)
        assert kept.stat().st_ino == before
        run.metrics_file.write_text("")  # the control: what differs is copied
        run.copy_record(kept)
        assert kept.stat().st_ino != before
        assert (kept / "metrics.jsonl").read_text() == ""

    def test_one_that_could_not_be_copied_leaves_the_old_one(self, tmp_path, monkeypatch):
        run, kept = fabricate(tmp_path / "run", accuracy=0.9), RunDirectory(tmp_path / "records" / "run")
        run.copy_record(kept.path)
        monkeypatch.setattr(Path, "write_bytes", _no_space)
        with pytest.raises(OSError, match="no space"):
            fabricate(tmp_path / "new", accuracy=0.8).copy_record(kept.path)
        assert kept.summary()["heldout_accuracy"] == 0.9
        assert [path.name for path in kept.path.parent.iterdir()] == ["run"]


def _no_space(*_):
    raise OSError("no space left on the device")
