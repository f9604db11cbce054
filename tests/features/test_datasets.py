"""Features of the catalog's data sets, in the user's cache directory."""

import torch
from tests.support.extractors import Scaled

from spectral_dp.data import load_dataset
from spectral_dp.features import datasets


def test_features_lie_in_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path))
    digits = load_dataset("digits")
    made = datasets.dataset_features(digits, Scaled(), "test")
    assert made.path.parent == tmp_path / "features" == datasets.features_directory()
    assert made.path.name.startswith("digits-8x8-test-scaled-")
    assert torch.equal(made[:5, :1].float(), digits.test_images[:5].float())
    assert (
        datasets.dataset_features(digits, Scaled(), "train", cache=tmp_path / "other").path.parent.parent.name
        == "other"
    )


def test_facts_are_the_published_constants():
    digits = load_dataset("digits")
    facts = datasets.facts_of(digits)
    assert (facts.shape, facts.mean, facts.std) == ((1, 8, 8), digits.mean, digits.std)
