"""A cache is whole, of these records and settings, or it is refused in words."""

import json

import numpy as np
import pytest
import torch
from tests.support.extractors import Scaled

from spectral_dp.features import FeatureError, cache, extract_features
from spectral_dp.features.cache import FeatureCache

IMAGES = torch.arange(10 * 16, dtype=torch.uint8).view(10, 1, 4, 4)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(cache, "_CHUNK_BYTES", 3 * 64)  # three rows


@pytest.fixture
def made(tmp_path):
    return extract_features(IMAGES, Scaled(), tmp_path, title="images")


def test_holds_half_precision_in_a_plain_npy_file(made):
    assert made.shape == (10, 2, 4, 4)
    assert made[3].dtype == torch.float16
    assert np.array_equal(np.load(made.path / "features.npy", mmap_mode="r"), made.tensor.numpy())
    assert torch.equal(made[:, :1].float(), IMAGES.float())


def test_what_is_read_can_not_change_the_file(made):
    made.tensor.zero_()
    assert FeatureCache(made.path)[3].sum() > 0


def test_is_mapped_and_not_loaded():
    """Catches reading the array whole: the rows of this one exist nowhere."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as directory:
        description = cache.describe("x", {}, "plain", "0", (1,), (2**21, 2**10))
        description["rows_of_a_chunk"] = 2**21
        (Path(directory) / "description.json").write_text(json.dumps(description))
        (Path(directory) / "journal.txt").write_text("0 00000000\n")
        with (Path(directory) / "features.npy").open("wb") as file:
            file.truncate(4096 + 2**32)
        assert FeatureCache(directory)[2**20 : 2**20 + 2].sum() == 0


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_truncated_cache_is_refused(made, size):
    content = (made.path / "features.npy").read_bytes()
    (made.path / "features.npy").write_bytes(content[:size])
    with pytest.raises(FeatureError, match="missing or truncated"):
        FeatureCache(made.path)


def test_a_cache_that_is_not_finished_is_refused(made):
    journal = made.path / "journal.txt"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(FeatureError, match="not finished: 1 of 4 chunks"):
        FeatureCache(made.path)


def test_a_line_that_was_cut_off_does_not_count(made):
    journal = made.path / "journal.txt"
    journal.write_text(journal.read_text()[:-4])
    with pytest.raises(FeatureError, match="not finished: 1 of 4"):
        FeatureCache(made.path)


def test_rows_that_changed_are_found(made):
    made.verify()
    with (made.path / "features.npy").open("r+b") as file:
        file.seek(4096 + 5 * 64)
        file.write(b"\x01\x02")
    with pytest.raises(FeatureError, match="damaged in 1 of 4 chunks"):
        FeatureCache(made.path).verify()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("inputs", "other", "another data set"),
        ("settings", {"factor": 3.0}, "other settings"),
        ("view", "mirrored", "another view"),
    ],
)
def test_a_cache_of_something_else_is_refused(made, name, value, message):
    FeatureCache(made.path, made.description)
    with pytest.raises(FeatureError, match=message):
        FeatureCache(made.path, made.description | {name: value})


def test_names_tell_caches_apart(made):
    same = cache.directory_name("images", made.description)
    assert made.path.name == same
    assert cache.directory_name("images", made.description | {"inputs": "other"}) != same


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("description.json", "{", "description.json is damaged"),
        ("description.json", "{}", "description.json is damaged"),
        ("description.json", '{"rows_of_a_chunk": 3, "shape": [10, 2, 4, "4"]}', "description.json is damaged"),
        ("description.json", '{"rows_of_a_chunk": 3, "shape": [-10, 2, 4, 4]}', "description.json is damaged"),
        ("journal.txt", "0 zz\n", "journal.txt is damaged"),
        ("journal.txt", "77 00000000\n", "journal.txt is of another cache"),
    ],
)
def test_damaged_records_are_named(made, file, text, message):
    (made.path / file).write_text(text)
    with pytest.raises(FeatureError, match=message):
        FeatureCache(made.path)


def test_an_absent_cache_names_the_command(tmp_path):
    with pytest.raises(FeatureError, match="spectral-dp features"):
        FeatureCache(tmp_path / "nothing")


def test_the_checksum_is_of_contents_shape_and_type():
    sums = {cache.checksum_of(t) for t in (IMAGES, IMAGES.view(10, 4, 4, 1), IMAGES.to(torch.int8), IMAGES.flip(0))}
    assert len(sums) == 4
    assert cache.checksum_of(IMAGES) == cache.checksum_of(IMAGES.clone())


def test_small_features_have_small_chunks_too(monkeypatch):
    """Catches chunks by bytes alone: 20,000 embeddings of texts were one, without progress for a quarter of an hour."""
    monkeypatch.undo()
    embeddings, maps = (
        cache.describe("x", {}, "plain", "0", (1,), (20_000, *shape)) for shape in ((384,), (243, 8, 8))
    )
    assert cache.chunk_count(embeddings) >= 16
    assert embeddings["rows_of_a_chunk"] > maps["rows_of_a_chunk"]
