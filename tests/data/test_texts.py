"""Texts as rows of bytes, and data sets of them."""

import numpy as np
import pytest
import torch

from spectral_dp.data import DataError
from spectral_dp.data.texts import MOST_BYTES, as_dataset, check_classes, decoded_texts, encoded_texts

TEXTS = ["plain", "", "ärger mit Umlauten", "日本語"]


def dataset(n=20):
    return as_dataset("mine", encoded_texts([f"text {i}" for i in range(n)]), [i % 3 for i in range(n)], 3, 0.2)


class TestRows:
    def test_texts_come_back(self):
        assert decoded_texts(torch.from_numpy(encoded_texts(TEXTS))) == TEXTS

    def test_long_ones_are_cut_off_between_characters(self):
        """Catches a row that ends in half a character, which could not be read again."""
        rows = torch.from_numpy(encoded_texts(["äää", "abcdef"], width=5))
        assert decoded_texts(rows) == ["ää", "abcde"]
        assert encoded_texts(["x" * 10_000]).shape == (1, MOST_BYTES)

    def test_zeros_within_a_text_are_spaces(self):
        assert decoded_texts(torch.from_numpy(encoded_texts(["a\0b"]))) == ["a b"]

    def test_no_texts(self):
        assert encoded_texts([]).shape == (0, 1)


class TestDataset:
    def test_a_fixed_part_is_held_out(self):
        found, again = dataset(), dataset()
        assert (len(found.train_labels), len(found.test_labels)) == (16, 4)
        assert torch.equal(found.test_images, again.test_images)
        both = decoded_texts(torch.cat([found.train_images, found.test_images]))
        assert sorted(both) == sorted(f"text {i}" for i in range(20))

    def test_labels_stay_with_their_texts(self):
        found = dataset()
        for texts, labels in ((found.train_images, found.train_labels), (found.test_images, found.test_labels)):
            assert [int(text.split()[1]) % 3 for text in decoded_texts(texts)] == labels.tolist()

    def test_subset_and_validation(self):
        found = dataset().with_validation(6).subset(5, 2)
        assert (len(found.train_images), len(found.train_labels)) == (5, 5)
        assert (len(found.test_images), len(found.test_labels)) == (2, 2)
        assert dataset().subset().train_images.shape == dataset().train_images.shape
        assert len(dataset().training()) == 16

    def test_shape_and_constants(self):
        found = dataset()
        assert found.input_shape == (7,)
        assert (found.mean, found.std) == ((), ())

    def test_bytes_are_no_numbers_to_train_on(self):
        with pytest.raises(DataError, match="choose features of them"):
            dataset().normalise(dataset().train_images)
        with pytest.raises(DataError, match="leave out the image size 8"):
            dataset().resized(8)


class TestClasses:
    def test_numbers_are_in_their_order_and_words_in_theirs(self):
        assert check_classes(["10", "2", "2"], "x") == ["2", "10"]
        assert check_classes(["no", "10", "yes"], "x") == ["10", "no", "yes"]

    @pytest.mark.parametrize(("labels", "found"), [(["a", "a"], "only 'a'"), ([], "none")])
    def test_one_class_is_none(self, labels, found):
        with pytest.raises(DataError, match=f"mine has {found} as classes: .* at least two"):
            check_classes(labels, "mine")


def test_rows_are_bytes():
    assert encoded_texts(TEXTS).dtype == np.uint8
