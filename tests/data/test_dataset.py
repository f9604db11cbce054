"""The data set in memory: normalised on the fly, cut down, resized."""

import pytest
import torch
from torch.nn import functional

from spectral_dp.data import DataError, ImageDataset


@pytest.fixture
def dataset():
    train, test = 500, 100
    return ImageDataset(
        name="made up",
        train_images=torch.randint(256, (train, 3, 6, 6), dtype=torch.uint8),
        train_labels=torch.arange(train),
        test_images=torch.randint(256, (test, 3, 6, 6), dtype=torch.uint8),
        test_labels=torch.arange(test),
        classes=train,
        mean=(0.5, 0.25, 0.1),
        std=(0.5, 0.2, 0.3),
    )


def test_normalise(dataset):
    images = dataset.train_images[:7]
    expected = torch.stack([(images[:, c] / 255 - dataset.mean[c]) / dataset.std[c] for c in range(3)], dim=1)
    before = images.clone()
    result = dataset.normalise(images)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected)
    assert torch.equal(images, before)
    torch.testing.assert_close(dataset.normalise(images[0]), expected[0])


def test_normalise_refuses(dataset):
    with pytest.raises(DataError, match=r"got torch.float32: these may be normalised already"):
        dataset.normalise(dataset.normalise(dataset.train_images))
    with pytest.raises(DataError, match=r"made up images are \(..., 3, H, W\), got \(500, 1, 6, 6\)"):
        dataset.normalise(dataset.train_images[:, :1])


def test_subset(dataset):
    small = dataset.subset(50, 20)
    assert (len(small.train_labels), len(small.test_labels)) == (50, 20)
    assert torch.equal(small.train_images, dataset.train_images[small.train_labels]), "images keep their labels"
    assert torch.equal(small.test_images, dataset.test_images[small.test_labels])
    assert torch.equal(dataset.subset(50, None).train_labels, small.train_labels), "deterministic"
    assert torch.equal(dataset.subset(200, None).train_labels[:50], small.train_labels), "nested"
    assert torch.equal(dataset.subset(None, 20).train_labels, dataset.train_labels), "None keeps all"
    assert small.train_labels.unique().numel() == 50


def test_subset_is_fixed_for_all_time(dataset):
    """Results are compared over versions: a change of the permutation would go unnoticed otherwise."""
    assert dataset.subset(6, None).train_labels.tolist() == [402, 40, 186, 225, 310, 266]


def test_subset_does_not_depend_on_the_data(dataset):
    """A choice by label would let one sample decide which others are trained on."""
    other = ImageDataset(**{**vars(dataset), "train_labels": dataset.train_labels.flip(0)})
    assert torch.equal(other.subset(50, None).train_images, dataset.subset(50, None).train_images)


def test_subset_keeps_the_class_mix(dataset):
    """Also where the samples are sorted by class, as some published files are. The first 50 would all be class 0."""
    sorted_by_class = ImageDataset(**{**vars(dataset), "train_labels": torch.arange(500) // 100})
    counts = sorted_by_class.subset(250, None).train_labels.bincount(minlength=5)
    assert ((counts - 50).abs() < 20).all()


@pytest.mark.parametrize(("train", "test"), [(501, None), (None, 101), (0, None), (None, -1)])
def test_subset_out_of_range(dataset, train, test):
    samples = "500 training" if train is not None else "100 test"
    with pytest.raises(DataError, match=f"has {samples} samples: ask for 1 to"):
        dataset.subset(train, test)


def test_resized(dataset):
    larger = dataset.resized(12)
    assert larger.train_images.shape == (500, 3, 12, 12)
    assert larger.test_images.shape == (100, 3, 12, 12)
    assert larger.train_images.dtype == torch.uint8
    assert larger.input_shape == (3, 12, 12)
    expected = functional.interpolate(dataset.test_images.float(), (12, 12), mode="bilinear")
    assert (larger.test_images - expected).abs().max() <= 0.5 + 1e-3
    assert torch.equal(larger.train_labels, dataset.train_labels)
    assert dataset.resized(6) is dataset


def test_resized_smaller_averages(dataset):
    """Without antialiasing a checkerboard of 0 and 200 would come out as either."""
    board = (torch.arange(6)[:, None] + torch.arange(6)) % 2 * 200
    images = board.to(torch.uint8).expand(4, 3, 6, 6)
    small = ImageDataset(**{**vars(dataset), "train_images": images}).resized(2).train_images
    assert ((small.int() - 100).abs() < 30).all()


def test_resized_in_chunks(dataset, monkeypatch):
    whole = dataset.resized(9)
    monkeypatch.setattr("spectral_dp.data.dataset._RESIZE_CHUNK", 7)
    assert torch.equal(dataset.resized(9).train_images, whole.train_images)


def test_resized_refuses(dataset):
    with pytest.raises(DataError, match="at least 1 pixel, got 0"):
        dataset.resized(0)
