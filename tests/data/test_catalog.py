"""The catalog is consistent with itself."""

import re

import pytest

from spectral_dp.data import NAMES
from spectral_dp.data.catalog import DATASETS, find

FETCHED = [info for info in DATASETS if info.editions]


def test_names():
    assert NAMES == (
        "digits",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "imdb",
        "heart-survey",
        "radiology-reports",
    )
    assert find("cifar10").name == "cifar10"


@pytest.mark.parametrize("info", DATASETS, ids=lambda info: info.name)
def test_a_constant_per_channel(info):
    assert len(info.mean) == len(info.std) == (0 if info.has_texts else info.shape[0])


@pytest.mark.parametrize("info", FETCHED, ids=lambda info: info.name)
def test_files(info):
    files = [file for edition in info.editions for file in edition.files]
    assert all(re.fullmatch("[0-9a-f]{32}", file.md5) for file in files)
    assert len({file.md5 for file in files}) == len(files), "a checksum copied to the wrong line"
    cached = info.editions[0]
    if info.package and info.package.client == "pip":
        assert re.fullmatch("[0-9a-f]{64}", info.package.sha256), "pip takes packages by their checksum only"
        return  # tables, whose sizes do not follow from the shape
    pixels = info.shape[0] * info.shape[1] * info.shape[2]
    for split, samples in ((cached.train, info.train_samples), (cached.test, info.test_samples)):
        assert 0 < sum(file.size for file in split) - samples * pixels < 3 * samples, "pixels, labels and headers"


@pytest.mark.parametrize("info", FETCHED, ids=lambda info: info.name)
def test_mirrors_are_encrypted_unless_they_cannot_be(info):
    plain = [address for address in info.mirrors if not address.startswith("https://")]
    assert all("s3-website" in address for address in plain), "S3 websites offer no https"
    assert all(address.endswith("/") for address in info.mirrors)
