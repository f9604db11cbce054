import fcntl
import signal
import subprocess
import sys
import threading

import pytest

from spectral_dp import files
from spectral_dp.files import (
    digest_of,
    locked,
    partial_directory,
    remove_abandoned,
    whole_file,
    write_json,
    write_text,
)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_file_appears_whole_and_nothing_beside_it(tmp_path):
    write_text(tmp_path / "note", "old")
    with whole_file(tmp_path / "note") as file:
        file.write(b"new")
        assert (tmp_path / "note").read_text() == "old"  # until the block ends
    assert (tmp_path / "note").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize("failure", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(tmp_path, failure):
    write_text(tmp_path / "note", "old")

    def write_half():
        with whole_file(tmp_path / "note") as file:
            file.write(b"ne")
            raise failure

    with pytest.raises(type(failure)):
        write_half()
    assert (tmp_path / "note").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_others_may_read_it_as_the_umask_says(tmp_path):
    """Catches the mode 0600 of temporary files, which a web server or a colleague could not read."""
    write_text(tmp_path / "note", "text")
    (tmp_path / "plain").write_text("text")
    assert (tmp_path / "note").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere"):
        write_text(tmp_path / "nowhere" / "note", "text")


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "numbers.json", {"epsilon": float("nan")})
    assert not list(tmp_path.iterdir())


WRITER = """
import runpy, sys, time
from pathlib import Path
write = runpy.run_path(sys.argv[1])[sys.argv[2]]  # without the package, which imports torch
with write(Path(sys.argv[3])) as made:
    if isinstance(made, Path):
        (made / "half").write_text("half of a directory")
    else:
        made.write(b"half of a file")
        made.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.fixture(params=["whole_file", "partial_directory"])
def writer(tmp_path, request):
    """Another process, in the middle of writing ``target``."""
    command = [sys.executable, "-c", WRITER, files.__file__, request.param, str(tmp_path / "target")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


class TestPartialFilesOfDeadWriters:
    def test_go_when_the_target_is_written_next(self, tmp_path, writer):
        """The first half is the control: while the writer lives, its file is its own."""
        (left,) = names(tmp_path)
        write_text(tmp_path / "target", "first")
        assert names(tmp_path) == [left, "target"]
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert names(tmp_path) == [left, "target"]
        write_text(tmp_path / "target", "second")
        assert names(tmp_path) == ["target"]
        assert (tmp_path / "target").read_text() == "second"

    def test_go_when_a_directory_is_prepared_next(self, tmp_path, writer):
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        with partial_directory(tmp_path / "target") as mine:
            assert names(tmp_path) == [mine.name]
        assert names(tmp_path) == []

    def test_stay_where_nothing_can_be_locked(self, tmp_path, writer, monkeypatch):
        """Whether their writer lives cannot be known there. Writing goes on as if there were none."""
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        (left,) = names(tmp_path)

        def unsupported(*_):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(fcntl, "flock", unsupported)
        write_text(tmp_path / "target", "text")
        assert names(tmp_path) == [left, "target"]

    def test_of_other_targets_and_programs_stay(self, tmp_path):
        others = [".target.partial", ".target.0123.partial", ".target.0123456z.partial", ".targets.01234567.partial"]
        for name in [*others, ".target.01234567.partial"]:
            (tmp_path / name).write_text("")
        (tmp_path / "elsewhere").write_text("")
        (tmp_path / ".target.76543210.partial").symlink_to(tmp_path / "elsewhere")
        write_text(tmp_path / "target", "text")
        assert names(tmp_path) == sorted([*others, ".target.76543210.partial", "elsewhere", "target"])

    def test_threads_do_not_take_each_other_for_dead(self, tmp_path):
        """Catches locks that belong to a process rather than to an open file."""
        begun, may_end, failures = threading.Barrier(5), threading.Event(), []

        def write(number):
            try:
                with whole_file(tmp_path / "target") as file:
                    begun.wait(10)
                    remove_abandoned(tmp_path / "target")
                    may_end.wait(10)
                    file.write(b"%d" % number)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        begun.wait(10)
        assert len(names(tmp_path)) == 4
        may_end.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert names(tmp_path) == ["target"]

    def test_a_file_removed_before_it_was_locked_is_made_again(self, tmp_path, monkeypatch):
        """Between making and locking, another writer may take it for abandoned: this one must not lose its work."""
        lock, removed = files._lock, []

        def late(descriptor):
            if not removed:
                removed.append(names(tmp_path))
                (tmp_path / removed[0][0]).unlink()
            return lock(descriptor)

        monkeypatch.setattr(files, "_lock", late)
        write_text(tmp_path / "target", "text")
        assert removed
        assert (tmp_path / "target").read_text() == "text"
        assert names(tmp_path) == ["target"]


def test_a_lock_is_held_once_and_freed_at_the_end(tmp_path):
    """Catches two processes that write the same directory, and a lock that outlives its block."""
    for _ in range(2):
        with locked(tmp_path / "lock") as is_ours, locked(tmp_path / "lock") as is_theirs:
            assert (is_ours, is_theirs) == (True, False)
    with locked(tmp_path / "lock", wait=True) as is_ours:
        assert is_ours


def test_digests_tell_values_apart_whatever_their_order():
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}) != digest_of({"a": 1, "b": 3})
