"""From names to tensors."""

import hashlib
import sys

import numpy as np
import pytest
import torch
from tests.support.published import original, tiny_mnist, write

from spectral_dp.data import DataError, TextDataset, cache_directory, catalog, load_dataset
from spectral_dp.data.catalog import DatasetInfo, Edition
from spectral_dp.data.reviews import parse_reviews
from spectral_dp.data.texts import decoded_texts


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


def test_digits(digits):
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    assert digits.train_images.dtype == torch.uint8
    assert digits.train_labels.dtype == torch.int64
    assert (digits.train_images.min(), digits.train_images.max()) == (0, 255)
    assert digits.classes == 10
    assert digits.input_shape == (1, 8, 8)


def test_digits_split_is_stratified_disjoint_and_complete(digits):
    shares = digits.test_labels.bincount() / (digits.test_labels.bincount() + digits.train_labels.bincount())
    assert ((shares - 0.2).abs() < 0.01).all()
    images = torch.cat([digits.train_images, digits.test_images]).flatten(1)
    assert len(images.unique(dim=0)) == len(images) == 1797


def test_digits_constants_are_those_of_the_training_images(digits):
    pixels = digits.train_images.double() / 255
    assert digits.mean[0] == pytest.approx(pixels.mean().item(), abs=5e-5)
    assert digits.std[0] == pytest.approx(pixels.std(correction=0).item(), abs=5e-5)


def test_digits_have_no_path():
    with pytest.raises(DataError, match="comes with scikit-learn"):
        load_dataset("digits", path="somewhere")


def test_from_cache_and_from_path_are_the_same(publish, tmp_path):
    info, contents = tiny_mnist()
    publish(info)
    write(cache_directory() / "tiny", contents)
    from_cache, from_path = (
        load_dataset("tiny"),
        load_dataset("tiny", path=write(tmp_path / "official", contents, compressed=True)),
    )
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        assert torch.equal(getattr(from_cache, name), getattr(from_path, name))
    assert (from_cache.mean, from_cache.std) == (info.mean, info.std)


def test_tensors_are_writable_and_contiguous(publish):
    info, contents = tiny_mnist()
    publish(info)
    write(cache_directory() / "tiny", contents)
    images = load_dataset("tiny").train_images
    assert images.is_contiguous()
    images.zero_()
    assert load_dataset("tiny").train_images.any()


def test_unknown_name_lists_the_valid_ones():
    with pytest.raises(
        DataError,
        match="'imagenet'; choose one of digits, mnist, fashion-mnist, cifar10, cifar100, imdb, heart-survey, "
        "radiology-reports",
    ):
        load_dataset("imagenet")


def test_not_fetched():
    with pytest.raises(DataError, match="run `spectral-dp data get cifar10`"):
        load_dataset("cifar10")


def test_digits_without_scikit_learn_say_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"^digits come with scikit-learn.*: pip install 'spectral-dp\[cli\]'$"):
        load_dataset("digits")


def test_texts_are_loaded_as_such(publish):
    """Rows of bytes, not images."""
    contents = {"train.csv": b"1,good film\n0,bad film\n", "test.csv": b"1,fine\n"}
    files = [original(name, content) for name, content in contents.items()]
    edition = Edition((files[0],), (files[1],), "texts", parse_reviews)
    publish(DatasetInfo("tiny-texts", (4096,), 2, 2, 1, (), (), (edition,)))
    write(cache_directory() / "tiny-texts", contents)
    found = load_dataset("tiny-texts")
    assert isinstance(found, TextDataset)
    assert decoded_texts(found.train_images) == ["good film", "bad film"]
    assert (found.train_labels.tolist(), found.classes) == ([1, 0], 2)


def test_records_published_as_one_set_are_split_by_their_number_alone(tmp_path, monkeypatch):
    """Catches a test split that overlaps the training split, or depends on the records."""
    contents = bytes(range(10))
    original = catalog.Original("all.bin", hashlib.md5(contents).hexdigest(), 10)

    def parse(files):
        (values,) = files
        numbers = np.frombuffer(values, np.uint8)
        return numbers.reshape(-1, 1), numbers % 2

    edition = catalog.Edition((original,), (), "some", parse)
    info = catalog.DatasetInfo("some", (1,), 2, 7, 3, (), (), editions=(edition,))
    monkeypatch.setattr(catalog, "DATASETS", (info,))
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "all.bin").write_bytes(contents)
    found = load_dataset("some", cache=tmp_path)
    train, test = found.train_images.flatten().tolist(), found.test_images.flatten().tolist()
    assert (len(train), len(test)) == (7, 3)
    assert sorted(train + test) == list(range(10))
    assert found.train_labels.tolist() == [number % 2 for number in train]
