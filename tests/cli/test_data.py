"""``spectral-dp data``: getting, listing, and plain errors."""

import errno
import gzip
import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectral_dp.cli.data import data_app
from spectral_dp.data import NAMES, catalog
from spectral_dp.data.catalog import DatasetInfo, Edition, Original
from spectral_dp.data.formats import parse_idx_pair

CONTENT = b"any bytes will do: nothing is parsed here"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def mirror(monkeypatch, tmp_path):
    """A catalog of digits and one small data set, from a mirror in a local directory."""
    directory = tmp_path / "mirror"
    directory.mkdir()
    (directory / "file.gz").write_bytes(gzip.compress(CONTENT))
    file = Original("file", hashlib.md5(CONTENT).hexdigest(), len(CONTENT))
    edition = Edition((file,), (), "folder", parse_idx_pair)
    small = DatasetInfo("small", (1, 2, 2), 10, 4, 2, (0.5,), (0.5,), (edition,), (directory.as_uri() + "/",))
    monkeypatch.setattr(catalog, "DATASETS", (catalog.find("digits"), small))
    monkeypatch.setattr(catalog, "NAMES", ("digits", "small"))
    return directory


def run(*arguments):
    return CliRunner().invoke(data_app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def test_get(mirror, cache):
    result = run("get", "small", "digits")
    assert result.exit_code == 0, result.stderr
    assert f"small: {cache / 'small'}" in result.stdout
    assert "digits: comes with scikit-learn" in result.stdout
    assert (cache / "small" / "file").read_bytes() == CONTENT


def test_get_elsewhere(mirror, cache, tmp_path):
    assert run("get", "small", "--cache", tmp_path / "other").exit_code == 0
    assert (tmp_path / "other" / "small" / "file").exists()
    assert not cache.exists()


def test_get_needs_force_for_a_corrupt_cache(mirror, cache):
    run("get", "small")
    (cache / "small" / "file").write_bytes(b"damaged")
    result = run("get", "small")
    assert result.exit_code == 1
    assert "run `spectral-dp data get small --force`" in result.stderr
    assert run("get", "small", "--force").exit_code == 0
    assert (cache / "small" / "file").read_bytes() == CONTENT


def test_failure_lists_what_was_tried_and_goes_on(mirror, cache):
    (mirror / "file.gz").unlink()
    result = run("get", "small", "digits")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: small could not be fetched; tried:\n  file://")
    assert "digits: comes with" in result.stdout
    assert not any(cache.iterdir())


def test_unwritable_cache(mirror, tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = run("get", "small", "--cache", tmp_path / "file")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot use the cache")


def test_unreadable_cache(mirror, monkeypatch):
    def denied(self, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_dir", denied)
    monkeypatch.setattr(Path, "exists", denied)
    for command in (["get", "small"], ["list"]):
        result = run(*command)
        assert result.exit_code == 1
        assert "Permission denied" in result.stderr
        assert result.stderr.startswith("error: cannot use the cache")


def test_unknown_name_is_a_usage_error_before_anything_is_fetched(mirror, cache):
    result = run("get", "small", "imagenet")
    assert result.exit_code == 2
    assert "there is no data set 'imagenet'; choose one of digits, small" in result.stderr
    assert not cache.exists()
    assert run("get").exit_code == 2


def test_list_of_the_real_catalog():
    result = run("list")
    assert result.exit_code == 0
    for name in NAMES:
        assert name in result.stdout
    listed = {row["name"]: row for row in json.loads(run("list", "--json").stdout)}
    assert list(listed) == list(NAMES)
    assert listed["cifar100"]["classes"] == 100
    assert listed["mnist"]["shape"] == [1, 28, 28]
    assert listed["cifar10"]["bytes"] == 60_000 * 3073
    assert listed["digits"]["state"] == "bundled"
    assert listed["mnist"]["state"] == "absent"
    assert listed["mnist"]["where"] is None


def test_list_shows_what_is_cached(mirror, cache):
    run("get", "small")
    assert "cached" in run("list").stdout
    _, small = json.loads(run("list", "--json").stdout)
    assert (small["state"], small["where"]) == ("cached", str(cache / "small"))
    (cache / "small" / "file").write_bytes(b"")
    assert json.loads(run("list", "--json").stdout)[1]["state"] == "corrupt"
