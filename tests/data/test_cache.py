"""The cache: where it is, and that a data set in it is whole or absent."""

import errno
import os
from pathlib import Path

import pytest
from tests.support.published import IDX_NAMES, tiny_mnist, write

from spectral_dp.data import DataError, cache_directory
from spectral_dp.data.cache import cache_errors, check_replaceable, install, place_of, read_cached, state_of, workspace


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SPECTRAL_DP_CACHE": "/chosen", "XDG_CACHE_HOME": "/xdg"}, "/chosen"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/spectral-dp"),
        ({"HOME": "/home/someone"}, "/home/someone/.cache/spectral-dp"),
        ({"HOME": "/home/someone", "SPECTRAL_DP_CACHE": "~/here"}, "/home/someone/here"),
        ({"HOME": "/home/someone", "SPECTRAL_DP_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/spectral-dp"),
    ],
)
def test_cache_directory(monkeypatch, environment, expected):
    for name in ("SPECTRAL_DP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)


def put(place, contents):
    with cache_errors(place), workspace(place) as directory:
        install(contents, place, directory)


def test_install_then_read(tmp_path):
    info, contents = tiny_mnist()
    place = place_of(info, tmp_path / "new" / "cache")
    put(place, contents)
    assert read_cached(info, tmp_path / "new" / "cache") == contents
    assert [path.name for path in place.parent.iterdir()] == ["tiny"], "no workspace is left"
    assert {path.name for path in place.iterdir()} == set(IDX_NAMES), "the published files and nothing else"


def test_not_fetched_yet_says_how():
    info, _ = tiny_mnist()
    with pytest.raises(DataError, match="run `spectral-dp data get tiny`"):
        read_cached(info)
    with pytest.raises(DataError, match="run `spectral-dp data get tiny --cache elsewhere`"):
        read_cached(info, "elsewhere")


def test_corrupt_cache_names_the_file_and_the_cure(tmp_path):
    info, contents = tiny_mnist()
    put(place_of(info, tmp_path), contents)
    damaged = place_of(info, tmp_path) / IDX_NAMES[2]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x00")
    with pytest.raises(DataError, match=rf"cache is corrupt: .*{IDX_NAMES[2]}: md5 .* get tiny --cache .* --force`"):
        read_cached(info, tmp_path)


def test_state(tmp_path):
    info, contents = tiny_mnist()
    place = place_of(info, tmp_path)
    assert state_of(info, place) == "absent"
    put(place, contents)
    assert state_of(info, place) == "cached"
    (place / IDX_NAMES[1]).write_bytes(b"short")
    assert state_of(info, place) == "corrupt"
    (place / IDX_NAMES[1]).unlink()
    assert state_of(info, place) == "corrupt"


@pytest.mark.parametrize("before", [None, {"old": b"content"}], ids=["new", "replacing"])
@pytest.mark.parametrize("at", ["fsync", "rename"])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, before, at):
    info, contents = tiny_mnist()
    place = place_of(info, tmp_path)
    if before:
        write(place, before)
    real_rename = Path.rename

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rename(self, target):
        return full() if self.name == "fresh" else real_rename(self, target)

    if at == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(DataError, match=f"cannot use the cache {tmp_path}: .*No space left.*make room, or choose"):
        put(place, contents)
    left = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == (before or {})


@pytest.mark.parametrize("cache", ["file", "file/below"])
def test_unwritable_cache(tmp_path, cache):
    (tmp_path / "file").write_text("in the way")
    info, contents = tiny_mnist()
    with pytest.raises(DataError, match=r"cannot use the cache .*file.* choose another directory with --cache"):
        put(place_of(info, tmp_path / cache), contents)
    assert (tmp_path / "file").read_text() == "in the way"


def test_nothing_else_is_replaced(tmp_path):
    """A cache directory given by mistake: a directory of that name with something else in it is not a data set."""
    info, _ = tiny_mnist()
    place = place_of(info, tmp_path)
    check_replaceable(info, place)
    write(place, {IDX_NAMES[0]: b"damaged"})
    check_replaceable(info, place)
    write(place, {"thesis.tex": b"years of work"})
    with pytest.raises(DataError, match=r"something else than tiny \(thesis.tex\)"):
        check_replaceable(info, place)
    (tmp_path / "tiny2").write_text("a file")
    with pytest.raises(DataError, match="something else"):
        check_replaceable(info, tmp_path / "tiny2")
