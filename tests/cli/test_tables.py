"""Tables at the width of a terminal: nothing is cut off."""

import io

import pytest
from rich.console import Console

from spectral_dp.cli.tables import print_wrapped, wrapping_table

HEADINGS = ("configuration", "accuracy %", "difference", "epsilon", "sigma", "parameters", "steps s", "peak MB")
LINES = [
    ("dpsgd", "93.67 ± 0.07", "", "1.999", "1.626", "3,924,810", "148.2", "2311"),
    ("spectral", "95.16 ± 0.19", "+1.48 [+1.19, +1.77]", "1.999", "1.626", "1,123,456", "84.1", "921"),
]


def shown(headings, lines, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(wrapping_table(headings, lines, width=width, title="t", caption="c"))
    return console.file.getvalue()


def test_the_table_of_a_comparison_fits_into_eighty_columns():
    text = shown(HEADINGS, LINES, 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for word in [word for part in (HEADINGS, *LINES) for cell in part for word in cell.split()]:
        assert word in text, word


@pytest.mark.parametrize("width", [30, 40, 60])
def test_what_does_not_fit_is_broken_and_not_cut_off(width):
    text = shown(HEADINGS, LINES, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    together = "".join(text.split())
    for word in (*HEADINGS, "93.67", "3,924,810", "2311", "+1.77]"):
        assert word.replace(" ", "") in together, word


def test_no_lines_and_long_names():
    assert "name" in shown(("name", "title"), [], 80)
    assert "a-very-long-name-indeed" in shown(("name", "title"), [("a-very-long-name-indeed", "word " * 40)], 80)


def test_the_terminal_decides(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_wrapped(HEADINGS, LINES)
    assert "…" not in capsys.readouterr().out
