"""One's own texts: a CSV file with a column of texts and a column of labels."""

from __future__ import annotations

import codecs
import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path

from spectral_dp.data.errors import DataError
from spectral_dp.data.texts import TextDataset, as_dataset, check_classes, encoded_texts

#: Share of the texts that is held out for tests.
TEST_SHARE = 0.2

_NAME = "csv"
_DELIMITERS = (",", ";", "\t")
_LONGEST_FIELD = 2**24
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def read_csv_texts(
    path: str | os.PathLike[str],
    *,
    text_column: str = "text",
    label_column: str = "label",
    encoding: str = "utf-8",
) -> TextDataset:
    """Reads texts and labels from a CSV file whose first line names its columns.

    Fields are separated by commas, semicolons or tabs. Labels may be any words: classes are numbered in their order. A
    fifth of the texts is held out: a fixed random choice, which depends on the number of texts alone.

    Args:
        path: The file.
        text_column: Name of the column with the texts.
        label_column: Name of the column with the labels.
        encoding: Encoding of the file. A byte order mark at its beginning wins.

    Raises:
        DataError: If the file is not such a file, a row has too few or too many fields, a text has no letter, a label
            is empty, or all labels are the same. The message names the file and the line.
    """
    file = Path(path)
    texts, labels = [], []
    for line, text, label in _rows(file, _content(file, encoding), text_column, label_column):
        if not any(character.isalpha() for character in text):
            raise DataError(f"{file}, line {line}: the text {text!r:.40} has no letter; remove the row")
        if not label.strip():
            raise DataError(f"{file}, line {line}: the label is empty; give it one, or remove the row")
        texts.append(text)
        labels.append(label.strip())
    names = check_classes(labels, f"{file}, column {label_column}")
    numbers = {name: number for number, name in enumerate(names)}
    return as_dataset(_NAME, encoded_texts(texts), [numbers[label] for label in labels], len(names), TEST_SHARE)


def _content(file: Path, encoding: str) -> str:
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    marked = next((name for mark, name in _BYTE_ORDER_MARKS.items() if raw.startswith(mark)), encoding)
    try:
        return raw.decode(marked)
    except LookupError as error:
        raise DataError(
            f"there is no encoding {encoding!r}: use utf-8, latin-1 or another that Python knows"
        ) from error
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"{file}, line {line}: not {marked} (byte 0x{raw[error.start]:02x}); save the file as UTF-8, or give "
            "--csv-encoding, such as latin-1"
        ) from error


def _rows(file: Path, content: str, text_column: str, label_column: str) -> Iterator[tuple[int, str, str]]:
    """Yields the line, the text and the label of every row."""
    if text_column == label_column:
        raise DataError(f"texts and labels cannot both be the column {text_column}: name two")
    delimiter, header = _header(file, content, (text_column, label_column))
    text_at, label_at = header.index(text_column), header.index(label_column)
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
        next(reader)
        begin = reader.line_num + 1
        for row in reader:
            if row and len(row) != len(header):
                raise DataError(
                    f"{file}, line {begin}: {len(row)} fields, but the first line names {len(header)} columns "
                    f"({', '.join(header)}); put a field that has a {delimiter!r} in quotes"
                )
            if row:
                yield begin, row[text_at], row[label_at]
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{file}, line {begin}: not a row of a CSV file ({error})") from error
    finally:
        csv.field_size_limit(limit)


def _header(file: Path, content: str, wanted: tuple[str, str]) -> tuple[str, list[str]]:
    """Returns the delimiter with which the first line has both columns, and the names of all columns."""
    first = io.StringIO(content, newline="").readline()
    headers = {}
    for delimiter in _DELIMITERS:
        try:
            headers[delimiter] = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
        except csv.Error as error:
            raise DataError(f"{file}, line 1: not the names of columns ({error})") from error
        if all(headers[delimiter].count(name) == 1 for name in wanted):
            return delimiter, headers[delimiter]
    best = max(headers.values(), key=len)
    missing = " and ".join(name for name in wanted if best.count(name) != 1)
    listed = ", ".join(best) if any(best) else "nothing"
    raise DataError(
        f"{file}, line 1 does not name the column {missing} once: it has {listed}; give --text-column and "
        "--label-column"
    )
