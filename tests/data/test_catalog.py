"""The catalog is consistent with itself."""

import re

import pytest

from spectral_dp.data import NAMES
from spectral_dp.data.catalog import RECIPES, find

FETCHED = [recipe for recipe in RECIPES if recipe.editions]


def test_names():
    assert NAMES == ("digits", "mnist", "fashion-mnist", "cifar10", "cifar100")
    assert find("cifar10").name == "cifar10"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_constant_per_channel(recipe):
    assert len(recipe.mean) == len(recipe.std) == recipe.shape[0]


@pytest.mark.parametrize("recipe", FETCHED, ids=lambda recipe: recipe.name)
def test_files(recipe):
    files = [file for edition in recipe.editions for file in edition.files]
    assert all(re.fullmatch("[0-9a-f]{32}", file.md5) for file in files)
    assert len({file.md5 for file in files}) == len(files), "a checksum copied to the wrong line"
    cached = recipe.editions[0]
    pixels = recipe.shape[0] * recipe.shape[1] * recipe.shape[2]
    for split, samples in ((cached.train, recipe.train_samples), (cached.test, recipe.test_samples)):
        assert 0 < sum(file.size for file in split) - samples * pixels < 3 * samples, "pixels, labels and headers"


@pytest.mark.parametrize("recipe", FETCHED, ids=lambda recipe: recipe.name)
def test_mirrors_are_encrypted_unless_they_cannot_be(recipe):
    plain = [address for address in recipe.mirrors if not address.startswith("https://")]
    assert all("s3-website" in address for address in plain), "S3 websites offer no https"
    assert all(address.endswith("/") for address in recipe.mirrors)
