"""Features are computed once, in parts, and whatever stops it, what is finished is kept and nothing else is."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from tests.support.extractors import Lying, Mixing, Scaled

from spectral_dp.features import FeatureError, Prepared, cache, extract_features, extraction
from spectral_dp.features.rows import ViewsOfRows

IMAGES = torch.arange(10 * 16, dtype=torch.uint8).view(10, 1, 4, 4)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(cache, "_CHUNK_BYTES", 3 * 64)  # three rows


def expected(images=IMAGES):
    return torch.cat([images.float(), 2 * images.float()], 1).half()


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_rows_in_their_order(tmp_path, jobs):
    seen = []
    made = extract_features(IMAGES, Scaled(), tmp_path, title="t", jobs=jobs, show=seen.append)
    assert torch.equal(made.tensor, expected())
    assert [p.finished for p in (seen[0], seen[-1])] == [0, 10]
    assert sorted(p.finished for p in seen) == [p.finished for p in seen]


def test_a_module_may_say_how_many_records_it_is_given_together(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_CHUNK_BYTES", 7 * 64)
    sizes, module = [], Scaled().module((1, 4, 4))
    module.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    module.rows_at_once = 5
    monkeypatch.setattr(Scaled, "module", lambda *_: module)
    assert torch.equal(extract_features(IMAGES, Scaled(), tmp_path, title="t").tensor, expected())
    assert sizes == [5, 2, 1, 3]  # one record alone: whether others matter is tried once


def test_views_are_caches_of_their_own(tmp_path):
    plain = extract_features(IMAGES, Scaled(), tmp_path, title="t")
    mirrored = extract_features(IMAGES, Scaled(), tmp_path, title="t", view="mirrored")
    assert torch.equal(mirrored.tensor, plain.tensor.flip(-1))
    assert plain.path != mirrored.path


def test_features_of_features(tmp_path):
    once = extract_features(IMAGES, Scaled(), tmp_path, title="t")
    twice = extract_features(once, Scaled(0.5), tmp_path, title="t")
    assert torch.equal(twice.tensor[:, 2:], (0.5 * once.tensor.float()).half())


class _Counting(Scaled):
    calls = 0

    def module(self, input_shape):
        inner = super().module(input_shape)

        def run(rows):
            _Counting.calls += len(rows)
            return inner(rows)

        return run


def test_what_is_there_is_not_computed_again(tmp_path):
    _Counting.calls = 0
    for _ in range(2):
        extract_features(IMAGES, _Counting(), tmp_path, title="t")
    assert _Counting.calls == 10 + 1  # one record is tried alone


def test_goes_on_after_the_last_finished_chunk(tmp_path):
    class Stop(Exception):
        pass

    def stop(progress):
        if progress.finished >= 6:
            raise Stop

    _Counting.calls = 0
    with pytest.raises(Stop):
        extract_features(IMAGES, _Counting(), tmp_path, title="t", show=stop)
    made = extract_features(IMAGES, _Counting(), tmp_path, title="t")
    assert _Counting.calls == 10 + 2  # each of the two times one record is tried alone
    assert torch.equal(made.tensor, expected())


def test_damaged_rows_are_computed_again_if_they_are_looked_at(tmp_path):
    made = extract_features(IMAGES, Scaled(), tmp_path, title="t")
    with (made.path / "features.npy").open("r+b") as file:
        file.seek(4096 + 7 * 64)
        file.write(b"\x01\x02\x03")
    repaired = extract_features(IMAGES, Scaled(), tmp_path, title="t", verify=True)
    assert torch.equal(repaired.tensor, expected())


@pytest.mark.parametrize("views", [1, 2])
def test_features_of_damaged_features_are_not_made(tmp_path, views):
    """Catches damage that outlives the repair of its source, whose identity is the same before and after."""
    names = ["mirrored", "plain"][-views:]
    caches = [extract_features(IMAGES, Scaled(), tmp_path, title="t", view=view) for view in names]
    source = ViewsOfRows(*caches) if views > 1 else caches[0]
    with (caches[-1].path / "features.npy").open("r+b") as file:
        file.seek(4096 + 7 * 64)
        file.write(b"\x01\x02\x03")
    with pytest.raises(FeatureError, match="damaged in 1 of 4 chunks"):
        extract_features(source, Prepared(), tmp_path, title="t")
    extract_features(IMAGES, Scaled(), tmp_path, title="t", verify=True)
    made = extract_features(source, Prepared(), tmp_path, title="t")
    assert torch.equal(made.tensor, expected() if views == 1 else (0.5 * (expected() + expected().flip(-1))).half())


def test_a_truncated_array_is_made_anew(tmp_path):
    made = extract_features(IMAGES, Scaled(), tmp_path, title="t")
    (made.path / "features.npy").write_bytes(b"short")
    assert torch.equal(extract_features(IMAGES, Scaled(), tmp_path, title="t").tensor, expected())


def test_a_killed_process_leaves_a_cache_that_goes_on(tmp_path):
    """SIGKILL, so that no handler helps: nothing half-written is taken for whole."""
    code = """
import sys, torch
from spectral_dp.features import cache, extract_features
from tests.support.extractors import Pausing
cache._CHUNK_BYTES = 3 * 64
images = torch.arange(60 * 16).remainder(256).to(torch.uint8).view(60, 1, 4, 4)
extract_features(images, Pausing(), sys.argv[1], title="t", show=lambda p: print(p.finished, flush=True))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    for line in process.stdout:
        if int(line) >= 6:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (directory,) = tmp_path.iterdir()
    with pytest.raises(FeatureError, match="not finished"):
        cache.FeatureCache(directory)
    images = torch.arange(60 * 16).remainder(256).to(torch.uint8).view(60, 1, 4, 4)
    from tests.support.extractors import Pausing

    began = []
    made = extract_features(images, Pausing(), tmp_path, title="t", show=lambda p: began.append(p.finished))
    assert began[0] >= 6
    assert torch.equal(made.tensor, expected(images))


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(tmp_path):
    """Catches processes that a kill leaves behind: they would wait for work for ever, and write without the lock."""
    code = """
import multiprocessing, sys, torch
from spectral_dp.features import cache, extract_features
from tests.support.extractors import Pausing
if __name__ == "__main__":
    cache._CHUNK_BYTES = 3 * 64
    images = torch.zeros(3000, 1, 4, 4, dtype=torch.uint8)
    def show(progress):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    extract_features(images, Pausing(), sys.argv[1], title="t", jobs=2, show=show)
"""
    (script := tmp_path / "script.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(tmp_path / "features")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    workers = next([int(pid) for pid in line.split()] for line in process.stdout if len(line.split()) == 2)
    process.send_signal(signal.SIGKILL)
    try:
        process.communicate(timeout=30)  # the pipe ends when the last process that could write to it has ended
    except subprocess.TimeoutExpired:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        pytest.fail("the processes went on")


@pytest.mark.parametrize("last", ["write_json", "_allocate", "_write_journal", "posix_fallocate"])
def test_a_process_killed_while_it_begins_leaves_a_cache_that_goes_on(tmp_path, monkeypatch, last):
    """Catches a half-begun cache that the next process takes for somebody else's directory."""
    where = os if hasattr(os, last) else cache
    begin = getattr(where, last)

    def killed(*arguments):
        if where is cache:
            begin(*arguments)
        os._exit(9)

    if not (child := os.fork()):  # it ends before it computes anything, so torch's threads are not missed
        monkeypatch.setattr(where, last, killed)
        try:
            extract_features(IMAGES, Scaled(), tmp_path, title="t")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (directory,) = tmp_path.iterdir()
    with pytest.raises(FeatureError, match="not finished"):
        cache.FeatureCache(directory)
    assert torch.equal(extract_features(IMAGES, Scaled(), tmp_path, title="t").tensor, expected())
    assert not list(directory.glob(".*.partial"))


def test_a_full_disk_is_told_at_the_beginning(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FeatureError, match=r"no room for .* MB.*make room"):
        extract_features(IMAGES, Scaled(), tmp_path, title="t")
    monkeypatch.undo()
    monkeypatch.setattr(cache, "_CHUNK_BYTES", 3 * 64)
    assert torch.equal(extract_features(IMAGES, Scaled(), tmp_path, title="t").tensor, expected())


def test_a_disk_that_fills_up_in_the_middle_keeps_what_is_finished(tmp_path, monkeypatch):
    write, written = os.pwrite, []

    def filling(descriptor, content, offset):
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(offset)
        return write(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", filling)
    with pytest.raises(FeatureError, match="No space left"):
        extract_features(IMAGES, Scaled(), tmp_path, title="t")
    monkeypatch.setattr(os, "pwrite", write)
    began = []
    made = extract_features(IMAGES, Scaled(), tmp_path, title="t", show=lambda p: began.append(p.finished))
    assert began[0] == 6
    assert torch.equal(made.tensor, expected())


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, offset: write(descriptor, content[:50], offset))
    assert torch.equal(extract_features(IMAGES, Scaled(), tmp_path, title="t").tensor, expected())


def test_two_processes_do_not_compute_the_same_cache_at_once(tmp_path):
    """The second one waits, and then finds all of it."""
    description = extraction.description_of(IMAGES, Scaled())
    directory = tmp_path / cache.directory_name("t", description)
    code = (
        "import torch, sys; from spectral_dp.features import extract_features, cache\n"
        "from tests.support.extractors import Scaled\ncache._CHUNK_BYTES = 3 * 64\n"
        "images = torch.arange(160, dtype=torch.uint8).view(10, 1, 4, 4); print('ready', flush=True)\n"
        "print(len(extract_features(images, Scaled(), sys.argv[1], title='t')))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with cache.claimed(directory, description):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.5)
        assert process.poll() is None
    assert process.communicate(timeout=60)[0] == b"10\n"


def test_a_directory_with_something_else_is_left_alone(tmp_path):
    description = extraction.description_of(IMAGES, Scaled())
    directory = tmp_path / cache.directory_name("t", description)
    directory.mkdir()
    (directory / "thesis.txt").write_text("mine")
    with pytest.raises(FeatureError, match=r"no cache of features \(it holds thesis.txt\)"):
        extract_features(IMAGES, Scaled(), tmp_path, title="t")
    assert [p.name for p in directory.iterdir() if p.name != ".lock"] == ["thesis.txt"]


def test_an_extractor_that_makes_another_shape_is_told_so(tmp_path):
    with pytest.raises(FeatureError, match="correct its output_shape"):
        extract_features(IMAGES, Lying(), tmp_path, title="t")


def test_an_extractor_that_mixes_records_is_refused(tmp_path):
    """Catches the leak of a front end in training mode: a record would be in the features of all others."""
    with pytest.raises(FeatureError, match=r"beside other records.*\.eval\(\)"):
        extract_features(IMAGES, Mixing(), tmp_path, title="t")
    (directory,) = tmp_path.iterdir()
    assert (directory / "journal.txt").read_text() == ""


def test_features_beyond_half_precision_are_refused(tmp_path):
    with pytest.raises(FeatureError, match="infinite in half precision"):
        extract_features(IMAGES, Scaled(1e6), tmp_path, title="t")


def test_no_records(tmp_path):
    with pytest.raises(FeatureError, match="no records"):
        extract_features(IMAGES[:0], Scaled(), tmp_path, title="t")
