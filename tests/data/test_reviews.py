"""Reviews of IMDb: taken out of the package, split, and read back."""

import csv
import io

import pytest
import torch

from spectral_dp.data import DataError, reviews
from spectral_dp.data.reviews import PACKAGED, imdb_files, parse_reviews
from spectral_dp.data.texts import decoded_texts


def packaged(rows):
    file = io.StringIO(newline="")
    csv.writer(file).writerows([("text", "label", "source"), *rows])
    return {PACKAGED: file.getvalue().encode()}


ROWS = [(f'review "{i}", with\nlines', str(i % 2), "imdb") for i in range(10)]


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(reviews, "TEST_REVIEWS", 3)


def test_reviews_of_imdb_are_split_and_others_left_out():
    files = imdb_files(packaged([*ROWS, ("a tomato", "1", "rotten_tomatoes")]))
    found = [parse_reviews([files[name]]) for name in ("train.csv", "test.csv")]
    assert [len(labels) for _, labels in found] == [7, 3]
    texts = [decoded_texts(torch.from_numpy(rows)) for rows, _ in found]
    assert sorted(texts[0] + texts[1]) == sorted(text for text, *_ in ROWS)
    labels = dict((text, int(label)) for text, label, _ in ROWS)
    for part, (_, of_part) in zip(texts, found, strict=True):
        assert [labels[text] for text in part] == of_part.tolist()


def test_the_files_are_always_the_same():
    """They have published checksums."""
    assert imdb_files(packaged(ROWS)) == imdb_files(packaged(ROWS))


def test_too_few():
    with pytest.raises(DataError, match="has 2 reviews"):
        imdb_files(packaged(ROWS[:2]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1,a\n0\n", "row 2 of the reviews has 1 fields"),
        (b"2,a\n", "0 or 1"),
        (b"\xff", "not a CSV"),
        (b'"', "not a CSV"),
    ],
)
def test_other_files_are_refused(content, message):
    with pytest.raises(DataError, match=message):
        parse_reviews([content])
