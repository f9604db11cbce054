"""One's own texts: read as they are meant, and refused with the line of the fault."""

import pytest
from tests.support.published import write

from spectral_dp.data import DataError
from spectral_dp.data.csv_texts import read_csv_texts
from spectral_dp.data.texts import decoded_texts

GOOD = "text,label\n" + "".join(f'"good, number {i}",{"yes" if i % 2 else "no"}\n' for i in range(10))


@pytest.fixture
def read(tmp_path):
    def made(content, **options):
        write(tmp_path, {"mine.csv": content if isinstance(content, bytes) else content.encode()})
        return read_csv_texts(tmp_path / "mine.csv", **options)

    return made


def texts(dataset):
    return sorted(decoded_texts(dataset.train_images) + decoded_texts(dataset.test_images))


class TestReading:
    def test_texts_and_labels(self, read):
        found = read(GOOD)
        assert texts(found) == sorted(f"good, number {i}" for i in range(10))
        assert (found.classes, len(found.train_labels), len(found.test_labels)) == (2, 8, 2)
        for text, label in zip(decoded_texts(found.train_images), found.train_labels.tolist(), strict=True):
            assert label == int(text[-1]) % 2

    @pytest.mark.parametrize("delimiter", [";", "\t"])
    def test_other_delimiters_and_columns(self, read, delimiter):
        rows = ["id,stars,review", *(f"{i},{i % 3},words {i}" for i in range(9))]
        found = read("\n".join(rows).replace(",", delimiter), text_column="review", label_column="stars")
        assert found.classes == 3
        assert texts(found) == [f"words {i}" for i in range(9)]

    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    def test_texts_of_several_lines_and_empty_lines_between_rows(self, read, newline):
        found = read(newline.join(["text,label", '"one', 'two",a', "", "three,b", ""]))
        assert texts(found) == [f"one{newline}two", "three"]

    @pytest.mark.parametrize(
        ("encoding", "said"), [("utf-8-sig", "utf-8"), ("utf-16", "utf-8"), ("latin-1", "latin-1"), ("utf-8", "utf-8")]
    )
    def test_encodings(self, read, encoding, said):
        found = read("text,label\nÄrger,a\nFreude,b\n".encode(encoding), encoding=said)
        assert texts(found) == ["Freude", "Ärger"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("text,label\none,a\ntwo\nthree,b\n", r"mine\.csv, line 3: 1 fields, but the first line names 2 columns"),
            ("text,label\none,a\ntwo, or so,b\n", r"mine\.csv, line 3: 3 fields.*put a field that has a ',' in quotes"),
            ('text,label\n"one\nmore",a\ntwo\n', r"mine\.csv, line 4: 1 fields"),
            ("text,label\none,a\n123 !?,b\n", r"mine\.csv, line 3: the text '123 !\?' has no letter"),
            ("text,label\none,a\ntwo, \n", r"mine\.csv, line 3: the label is empty"),
            ("text,label\none,a\ntwo,a\n", r"mine\.csv, column label has only 'a' as classes"),
            ("text,label\n", "has none as classes"),
            ("", r"line 1 does not name the column text and label once: it has nothing"),
            ("words,label\none,a\n", r"does not name the column text once: it has words, label; give --text-column"),
            ("text,text,label\none,two,a\n", "does not name the column text once: it has text, text, label"),
            ('text,label\n"one,a\ntwo,b\n', r"mine\.csv, line 2: not a row of a CSV file"),
            (b"text,label\none,a\n\xc4rger,b\n", r"mine\.csv, line 3: not utf-8 \(byte 0xc4\).*--csv-encoding"),
        ],
        ids=lambda value: None if isinstance(value, str | bytes) else "",
    )
    def test_the_file_and_the_line_are_named(self, read, content, message):
        with pytest.raises(DataError, match=message):
            read(content)

    def test_no_file(self, tmp_path):
        with pytest.raises(DataError, match=r"cannot read .*nowhere\.csv: No such file"):
            read_csv_texts(tmp_path / "nowhere.csv")

    def test_no_encoding(self, read):
        with pytest.raises(DataError, match="no encoding 'klingon'"):
            read(GOOD, encoding="klingon")

    def test_one_column_for_both(self, read):
        with pytest.raises(DataError, match="name two"):
            read(GOOD, text_column="label")
