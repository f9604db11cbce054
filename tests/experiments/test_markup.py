"""Pieces of a page: whatever text goes in comes out as text."""

from html import unescape

import pytest

from spectral_dp.experiments import markup

TEXT = '<i a="1">&amp;'


@pytest.mark.parametrize(
    "made",
    [
        markup.heading(2, TEXT),
        markup.paragraph(TEXT),
        markup.paragraph(TEXT, "note"),
        markup.bullets([TEXT]),
        markup.details(TEXT, ""),
        markup.figure("", TEXT),
        markup.table([TEXT], [[TEXT, TEXT]], TEXT),
        markup.pairs({TEXT: TEXT}, TEXT),
    ],
)
def test_text_is_escaped(made):
    assert TEXT not in made
    assert '"1"' not in made
    assert TEXT in unescape(made)


def test_markup_inside_is_left_as_it_is():
    inner = markup.paragraph("a")
    for outer in (markup.box("warning", inner), markup.details("title", inner), markup.side_by_side([inner])):
        assert "<p>a</p>" in outer


def test_a_table_has_headings_for_its_columns_and_rows():
    made = markup.table(["run", "epsilon"], [["a", 1], ["b", 2]], "note")
    assert made.count('scope="col"') == made.count('scope="row"') == 2
    assert "<td>2</td>" in made
