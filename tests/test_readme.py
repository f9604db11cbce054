"""The code on every page runs as it stands there."""

import importlib.util
import os

import pytest

from tests.support.pages import PAGES, ROOT, blocks

#: What the code of a page prints, where that says whether it did what it should.
PRINTS = {
    "README.md": "epsilon = ",
    "docs/quickstart.md": "epoch 3: epsilon = 2.00",
    "docs/audit.md": "no violation found",
    "docs/priors.md": "nothing of it is released or charged",
    "docs/transfer.md": "Linear(in_features=512",
}
#: Pages whose code needs an optional package.
NEEDS = {"docs/features.md": "kymatio"}

#: Pages of tutorials are written from scripts, which tests/test_tutorials.py runs.
NAMES = [str(page.relative_to(ROOT)) for page in PAGES if page.parent.name != "tutorials"]
WITH_CODE = [name for name in NAMES if blocks((ROOT / name).read_text(), "python", "py")]


@pytest.mark.parametrize("page", WITH_CODE)
def test_python_examples_run(page, capsys, tmp_path, monkeypatch):
    if (package := NEEDS.get(page)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    monkeypatch.setattr("spectral_dp.features.registry._REGISTRY", {})  # pages register what is theirs
    monkeypatch.setenv("SPECTRAL_DP_CACHE", os.environ.get("SPECTRAL_DP_CACHE", str(tmp_path)))
    namespace: dict = {}
    for block in blocks((ROOT / page).read_text(), "python", "py"):
        exec(compile(block.replace("/tmp/", f"{tmp_path}/"), page, "exec"), namespace)
    assert PRINTS.get(page, "") in capsys.readouterr().out


def test_what_should_be_printed_is_of_pages_with_code():
    assert {*PRINTS, *NEEDS} <= set(WITH_CODE)


def test_blocks_are_found_and_exempt_only_with_a_reason():
    text = "```python\na\n```\n\n<!-- not run: it needs two machines -->\n```python\nb\n```\n\n  ```py\n  c\n  ```\n"
    assert blocks(text, "python", "py") == ["a\n", "  c\n"]
    assert blocks(text.replace("it needs two machines ", ""), "python") == ["a\n", "b\n"]
