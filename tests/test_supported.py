"""``docs/supported.md`` says what is found when every layer is tried, and nothing it says is wrong."""

from pathlib import Path

import pytest
from torch import nn

from spectral_dp.gradients.rules.linear import LinearRule
from tests.support.support_table import EXACT, Finding, find, row, rows_of
from tests.support.supported_layers import LAYERS

PAGE = Path(__file__).parents[1] / "docs" / "supported.md"


@pytest.fixture(scope="module", name="page")
def _page():
    return rows_of(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", LAYERS, ids=lambda entry: entry.name)
def test_the_page_says_what_is_found(entry, page):
    """How a layer is treated and what its error says, word by word; the measured difference by its limit."""
    finding = find(entry)
    how, detail, error, _ = page[entry.name]
    assert [how, detail] == rows_of(row(finding))[entry.name][:2], "run `make support-table`"
    assert finding.how != "WRONG"
    assert (error == "") == (finding.error is None)
    assert not error or float(error) < EXACT


def test_no_line_of_the_page_is_wrong_or_left_over(page):
    assert all(how in ("rule", "fallback", "rule, fallback", "refused") for how, *_ in page.values())
    assert {entry.name for entry in LAYERS} <= page.keys()


@pytest.mark.slow
def test_models_of_hugging_face(page):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from tests.support.supported_models import MODELS

    for entry in MODELS:
        finding = find(entry)
        assert finding.how == page[entry.name][0], finding
    assert {entry.name for entry in (*LAYERS, *MODELS)} == page.keys()


class TestControls:
    """A rule that is wrong, and one that is not there, are found."""

    ENTRY = LAYERS[0]

    def test_a_wrong_rule(self, monkeypatch):
        clipped_sum = LinearRule.clipped_sum
        monkeypatch.setattr(
            LinearRule, "clipped_sum", lambda *args: {name: 1.001 * g for name, g in clipped_sum(*args).items()}
        )
        assert find(self.ENTRY).how == "WRONG"

    def test_a_missing_rule(self):
        class Own(nn.Linear):
            def forward(self, x):
                return super().forward(x)

        entry = self.ENTRY._replace(make=lambda: Own(64, 3))
        assert find(entry)[:3] == Finding(entry.name, "fallback", "`Own`")[:3]
