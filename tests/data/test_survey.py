"""The health survey: answers as numbers, by public ranges."""

import pytest

from spectral_dp.data import DataError, survey
from spectral_dp.data.survey import NUMBERS, PACKAGED, parse_survey, survey_files

HEADER = (
    "HeartDisease,BMI,Smoking,AlcoholDrinking,Stroke,PhysicalHealth,MentalHealth,DiffWalking,Sex,AgeCategory,Race,"
    "Diabetic,PhysicalActivity,GenHealth,SleepTime,Asthma,KidneyDisease,SkinCancer"
)
PLAIN = "No,35,No,No,No,0.0,30.0,No,Female,75-79,White,Yes,No,Good,12.0,No,No,Yes"
QUOTED = '"Yes,99,Yes,No,No,0.0,0.0,No,Male,18-24,Other,""No, borderline diabetes"",No,Poor,9.0,No,No,No"'


def content(*rows):
    return b"\xef\xbb\xbf" + "\r\n".join([HEADER, *rows, ""]).encode()


def test_answers_become_numbers():
    numbers, labels = parse_survey([content(PLAIN, QUOTED)])
    assert numbers.shape == (2, 1, 1, NUMBERS)
    assert labels.tolist() == [0, 1]
    bmi, physical, mental, sleep, smoking = numbers[0, 0, 0, :5].tolist()
    assert (bmi, physical, mental, sleep, smoking) == (128, 0, 255, 128, 0)
    assert numbers[1, 0, 0, 0] == 255, "beyond the public range counts as its end"
    assert numbers[1, 0, 0, 4] == 255


def test_every_question_with_several_answers_has_one():
    numbers, _ = parse_survey([content(PLAIN, QUOTED)])
    choices = numbers[:, 0, 0].reshape(2, -1)[:, 9:]  # after quantities, four of yes or no, and sex
    assert (choices[:, :13].sum(1) == 255).all(), "age"


def test_a_fixed_part_is_held_out(monkeypatch):
    monkeypatch.setattr(survey, "TEST_RECORDS", 3)
    found = {PACKAGED: content(*(PLAIN.replace("35", str(20 + i)) for i in range(10)))}
    files = survey_files(found)
    parts = [parse_survey([files[name]])[0] for name in ("train.csv", "test.csv")]
    assert [len(part) for part in parts] == [7, 3]
    assert len({int(part) for rows in parts for part in rows[:, 0, 0, 0]}) == 10
    assert files == survey_files(found)


def test_too_few():
    with pytest.raises(DataError, match="too few to hold out"):
        survey_files({PACKAGED: content(PLAIN)})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (PLAIN + ",more", "row 2 of the survey has another number"),
        (PLAIN.replace("35", "16.июн"), "BMI of the survey must be numbers"),
        (PLAIN.replace("White", "Green"), "Race of the survey is one of .*, got 'Green'"),
        (PLAIN.replace("No,35", "Maybe,35"), "HeartDisease of the survey is one of No, Yes"),
    ],
)
def test_other_answers_are_refused(row, message):
    with pytest.raises(DataError, match=message):
        parse_survey([content(row)])


@pytest.mark.parametrize(("raw", "message"), [(b"", "empty"), (b"\xff\xfe", "not a CSV"), (b"a,b\n", "other columns")])
def test_other_files_are_refused(raw, message):
    with pytest.raises(DataError, match=message):
        parse_survey([raw])
