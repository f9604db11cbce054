"""Tutorials: every page is that of its script, and every script runs."""

import importlib.util
import re

import pytest
from website.tutorials import PAGES, SCRIPTS, page_of, read_cells, run_cells, without_results

from tests.support.pages import ROOT

NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
NEEDS = {"language_model": "transformers"}
LONGER = {"several_processes"}  # starts processes of its own; `make test-integrations` runs it, too


def test_there_is_a_page_for_each_script_and_each_is_in_the_navigation():
    assert sorted(path.stem for path in PAGES.glob("*.md")) == NAMES
    named = re.findall(r"tutorials/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(named) == NAMES
    assert len(NAMES) == 8


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_its_script_says(name):
    """All but the results. If this fails, run `make tutorials`."""
    page = (PAGES / f"{name}.md").read_text()
    assert without_results(page) == page_of(SCRIPTS / f"{name}.py", read_cells(SCRIPTS / f"{name}.py"))
    assert page.count('```text title="Output"') >= 3, "a tutorial shows what its code prints"
    for figure in re.findall(r"\]\(([\w-]+\.png)\)", page):
        assert (PAGES / figure).read_bytes().startswith(b"\x89PNG")
    assert sorted(re.findall(rf"{name}-\d+\.png", page)) == sorted(path.name for path in PAGES.glob(f"{name}-*.png"))


@pytest.mark.filterwarnings("ignore")  # of packages of others; what a tutorial warns of, it shows
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONGER)) for name in NAMES])
def test_a_script_runs(name, tmp_path):
    if (package := NEEDS.get(name)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    script = SCRIPTS / f"{name}.py"
    cells = read_cells(script)
    run_cells(script, cells, tmp_path)
    page = (PAGES / f"{name}.md").read_text()
    assert sum(len(cell.figures) for cell in cells) == len(re.findall(r"!\[Figure drawn", page))
    assert [bool(cell.printed.strip()) for cell in cells].count(True) == page.count('```text title="Output"')


def test_the_bug_is_found_and_the_repair_passes():
    """What the tutorial on audits is about must be what its page shows."""
    page = (PAGES / "find_the_bug.md").read_text()
    assert "violation" in page.partition("## Look at the noise")[0].lower()
    assert "no violation found" in page.partition("## The repair")[2]


def test_negative_control_a_changed_script_is_noticed(tmp_path):
    script = tmp_path / "a.py"
    script.write_text('"""Doc."""\n\n# %% [markdown]\n# # Title\n#\n# Text.\n\n# %%\nprint("one")\n')
    cells = read_cells(script)
    assert [(cell.is_text, cell.source) for cell in cells] == [(True, "# Title\n\nText."), (False, 'print("one")')]
    run_cells(script, cells, tmp_path)
    page = page_of(script, cells)
    assert '```text title="Output"\none\n```' in page
    assert without_results(page) == page_of(script, read_cells(script))
    script.write_text(script.read_text().replace("one", "two"))
    assert without_results(page) != page_of(script, read_cells(script))
