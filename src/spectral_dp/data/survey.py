"""A health survey (BRFSS 2020, as a package has it): answers as numbers, by public ranges and lists of answers.

Ranges and lists are fixed here. Those of the data would be statistics of private records.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

import numpy as np

from spectral_dp.data.dataset import validation_order
from spectral_dp.data.errors import DataError
from spectral_dp.data.formats import Samples

_LABEL = "HeartDisease"
_RANGES = {"BMI": (10, 60), "PhysicalHealth": (0, 30), "MentalHealth": (0, 30), "SleepTime": (0, 24)}
_YES_NO = ("No", "Yes")
_ANSWERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Smoking", "AlcoholDrinking", "Stroke", "DiffWalking"), _YES_NO),
    "Sex": ("Female", "Male"),
    "AgeCategory": (
        *("18-24", "25-29", "30-34", "35-39", "40-44", "45-49", "50-54", "55-59", "60-64", "65-69", "70-74", "75-79"),
        "80 or older",
    ),
    "Race": ("American Indian/Alaskan Native", "Asian", "Black", "Hispanic", "Other", "White"),
    "Diabetic": ("No", "No, borderline diabetes", "Yes", "Yes (during pregnancy)"),
    "PhysicalActivity": _YES_NO,
    "GenHealth": ("Poor", "Fair", "Good", "Very good", "Excellent"),
    **dict.fromkeys(("Asthma", "KidneyDisease", "SkinCancer"), _YES_NO),
}

#: How many numbers a record has: one for each quantity and each question with two answers, else one for each answer.
NUMBERS = len(_RANGES) + sum(1 if len(answers) == 2 else len(answers) for answers in _ANSWERS.values())


PACKAGED = "train.csv"
TEST_RECORDS = 27_959


def survey_files(found: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the training and the test split: a fixed random part of the records is held out.

    The package has a test file as well, but a spreadsheet has turned some of its numbers into dates.
    """
    header, *records = found[PACKAGED].splitlines(keepends=True)
    if len(records) <= TEST_RECORDS:
        raise DataError(f"the survey has {len(records)} records, too few to hold out {TEST_RECORDS}")
    held, kept = (sorted(index.tolist()) for index in validation_order("survey", len(records), TEST_RECORDS))
    parts = {"train.csv": kept, "test.csv": held}
    return {name: b"".join([header, *(records[number] for number in part)]) for name, part in parts.items()}


def parse_survey(files: Sequence[bytes]) -> Samples:
    """Reads one split: answers ``(N, 1, 1, NUMBERS)`` from 0 to 255, and labels, 1 for a heart disease.

    Raises:
        DataError: If a row is not as the survey has it. The message has its number.
    """
    header, rows = _table(files)
    columns = {name: [row[at] for row in rows] for at, name in enumerate(header)}
    wanted = {_LABEL, *_RANGES, *_ANSWERS}
    if set(columns) != wanted:
        raise DataError(f"the survey has other columns than expected: {', '.join(sorted(set(columns) ^ wanted))}")
    found = [_scaled(name, columns[name], *limits) for name, limits in _RANGES.items()]
    for name, answers in _ANSWERS.items():
        at = _chosen(name, columns[name], answers)
        found += [255 * (at == place) for place in (range(1, 2) if len(answers) == 2 else range(len(answers)))]
    numbers = np.stack(found, axis=1).astype(np.uint8)
    return numbers[:, None, None], _chosen(_LABEL, columns[_LABEL], _YES_NO).astype(np.uint8)


def _table(files: Sequence[bytes]) -> tuple[list[str], list[list[str]]]:
    try:
        text = b"".join(files).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"not a CSV file: {error}") from error
    rows = list(csv.reader(io.StringIO(text, newline="")))
    # Rows in which an answer has a comma are in quotes as a whole.
    rows = [next(csv.reader(row)) if len(row) == 1 else row for row in rows]
    if ragged := [number for number, row in enumerate(rows, 1) if len(row) != len(rows[0])]:
        raise DataError(f"row {ragged[0]} of the survey has another number of answers than the first row has names")
    if not rows:
        raise DataError("the survey is empty")
    return rows[0], rows[1:]


def _scaled(name: str, values: list[str], least: float, most: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    try:
        numbers = np.array([float(value) for value in values])
    except ValueError as error:
        raise DataError(f"{name} of the survey must be numbers: {error}") from error
    return np.round(255 * (np.clip(numbers, least, most) - least) / (most - least))


def _chosen(name: str, values: list[str], answers: tuple[str, ...]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    places = {answer: place for place, answer in enumerate(answers)}
    if strangers := {*values} - {*answers}:
        raise DataError(f"{name} of the survey is one of {', '.join(answers)}, got {sorted(strangers)[0]!r}")
    return np.array([places[value] for value in values], np.int64)
