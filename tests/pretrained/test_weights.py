"""Weights that were found make the network; the published ones see and read what they should."""

import hashlib
import os
from pathlib import Path

import pytest
import torch
from tests.support.pretrained import published, state_of, weights_content
from torch.nn import functional as F

from spectral_dp.pretrained import WeightsError, catalog, fetch_weights, find_weights
from spectral_dp.pretrained.store import state_of_weights

NAME = "mobilenet-v2"
REAL_CACHE = Path(os.environ.get("SPECTRAL_DP_CACHE", Path.home() / ".cache" / "spectral-dp"))


@pytest.fixture(scope="module")
def content():
    return weights_content(NAME)


@pytest.fixture
def cached(tmp_path, monkeypatch, content):
    (tmp_path / "weights.safetensors").write_bytes(content)
    monkeypatch.setattr(catalog, "WEIGHTS", (published(content, tmp_path.as_uri() + "/"),))
    fetch_weights(NAME)
    return find_weights(NAME)


def test_from_the_cache(cached, content):
    assert cached.sha256 == hashlib.sha256(content).hexdigest()
    network, published_state = cached.network(classes=5), state_of(NAME)
    assert not network.training
    assert all(torch.equal(value, published_state[key]) for key, value in network.state_dict().items())
    assert "classifier.1.weight" not in cached.network().state_dict()


def test_the_statement_says_by_whom_and_on_what(cached):
    for fact in ("the tests", "random numbers", "Apache-2.0", "taken to be public", "neither protects"):
        assert fact in cached.assumption


def test_a_file_of_ones_own(tmp_path, content):
    (tmp_path / "mine.safetensors").write_bytes(content)
    found = find_weights(NAME, tmp_path / "mine.safetensors")
    assert "who vouches for the data" in found.assumption
    assert found.sha256 in found.assumption
    found.network()


def test_a_file_that_changes_is_noticed(tmp_path, content):
    path = tmp_path / "mine.safetensors"
    path.write_bytes(content)
    found = find_weights(NAME, path)
    path.write_bytes(content[:-1] + b"x")
    with pytest.raises(WeightsError, match="was changed since it was found"):
        found.network()


def test_a_file_of_another_network(tmp_path, content):
    (tmp_path / "mine.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"mine\.safetensors does not hold weights of resnet18.*like mobilenet-v2"):
        find_weights("resnet18", tmp_path / "mine.safetensors")


def test_a_file_that_is_cut_off_is_found_at_once(tmp_path, content):
    (tmp_path / "mine.safetensors").write_bytes(content[:-1000])
    with pytest.raises(WeightsError, match=r"mine\.safetensors is truncated or damaged"):
        find_weights(NAME, tmp_path / "mine.safetensors")


def test_a_vocabulary_is_missing(cached):
    with pytest.raises(WeightsError, match=r"cannot read the vocabulary .*vocab\.txt"):
        cached.tokenizer()


def real(name):
    if state_of_weights(name, REAL_CACHE) != "cached":
        pytest.skip(f"the published weights are not in the cache: spectral-dp weights get {name}")
    return find_weights(name, cache=REAL_CACHE)


@pytest.mark.parametrize("name", ["mobilenet-v2", "efficientnet-lite0", "efficientnet-lite2", "resnet50"])
def test_published_weights_recognise_a_palace(name):
    """A photograph that comes with scikit-learn; ImageNet's classes palace, bell cote and monastery."""
    from sklearn.datasets import load_sample_image

    weights = real(name)
    pixels = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None, :, :, 100:527].float() / 255
    image = F.interpolate(pixels, (224, 224), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (weights.mean, weights.std))
    with torch.no_grad():
        best = int(weights.network(classes=1000)((image - mean) / std).argmax())
    assert best in (698, 442, 663)


def test_published_weights_read_what_sentences_mean():
    weights = real("minilm-l6")
    texts = ["A cat sleeps on the sofa.", "A kitten is napping on the couch.", "Interest rates rose in March."]
    pieces = weights.tokenizer().encode(texts, length=16)
    assert pieces[0].tolist()[:9] == [101, 1037, 4937, 25126, 2006, 1996, 10682, 1012, 102]
    with torch.no_grad():
        vectors = F.normalize(weights.network().pooled(pieces))
    similar = vectors @ vectors.T
    assert similar[0, 1] > 0.7
    assert similar[0, 2] < 0.2
