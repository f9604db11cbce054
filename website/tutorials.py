"""Tutorials: a script of ``examples/tutorials/`` becomes a page, with what it prints and the figures it draws.

    python -m website.tutorials [NAME ...]

A script is in the percent format that editors and Jupytext read: ``# %% [markdown]`` begins text, written as comments,
and ``# %%`` begins code. The cells are run in order in one namespace. What a cell prints stands below it on the page,
and ``plt.show()`` puts the figure there. So the page shows what the script does, and a test compares the two.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS, PAGES = ROOT / "examples" / "tutorials", ROOT / "docs" / "tutorials"
_MARKER = re.compile(r"^# %%( \[markdown\])?$", re.MULTILINE)


@dataclass
class Cell:
    """Text or code of a script, and what the code did."""

    is_text: bool
    source: str
    printed: str = ""
    figures: list[str] = field(default_factory=list)


def read_cells(script: Path) -> list[Cell]:
    """Returns the cells of a script; what stands before the first marker is its docstring, which is not shown."""
    parts = _MARKER.split(script.read_text(encoding="utf-8"))[1:]
    cells = [Cell(bool(kind), source.strip("\n")) for kind, source in zip(parts[::2], parts[1::2], strict=True)]
    for cell in cells:
        if cell.is_text:
            cell.source = re.sub(r"^# ?", "", cell.source, flags=re.MULTILINE)
    return cells


def run_cells(script: Path, cells: list[Cell], figures: Path) -> None:
    """Runs the code, keeps what it prints, and writes its figures into a directory as ``NAME-1.png`` and so on."""
    import matplotlib

    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    count = 0
    for cell in cells:
        if cell.is_text:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), _drawing() as drawn:
            exec(compile(cell.source, str(script), "exec"), namespace)
        cell.printed = printed.getvalue()
        for figure in drawn:
            count += 1
            name = f"{script.stem}-{count}.png"
            figure.savefig(figures / name, dpi=110, metadata={"Software": None})
            cell.figures.append(name)


@contextlib.contextmanager
def _drawing() -> Iterator[list[Any]]:
    """Collects the figures that are shown in place of showing them."""
    from matplotlib import pyplot as plt

    drawn: list[Any] = []
    show = plt.show
    plt.show = lambda *_, **__: drawn.append(plt.gcf())
    try:
        yield drawn
    finally:
        plt.show = show
        plt.close("all")


def page_of(script: Path, cells: list[Cell]) -> str:
    """Returns the page in Markdown."""
    parts = [f"<!-- Written by `make tutorials` from examples/tutorials/{script.name}: change that script. -->"]
    for cell in cells:
        if cell.is_text:
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        if cell.printed.strip():
            parts.append(f'```text title="Output"\n{cell.printed.rstrip()}\n```')
        parts += [f"![Figure drawn by the code above]({name})" for name in cell.figures]
    parts.append(f"The whole script: [`examples/tutorials/{script.name}`](../../examples/tutorials/{script.name}).")
    return "\n\n".join(parts) + "\n"


def without_results(page: str) -> str:
    """Returns a page without what was printed and drawn: what must follow from the script alone."""
    page = re.sub(r'^```text title="Output"\n.*?^```\n\n', "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^!\[Figure drawn by the code above\]\(.*\)\n\n", "", page, flags=re.MULTILINE)


def main() -> None:
    """Writes the pages of some tutorials, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts without .py; all if none is given")
    asked = parser.parse_args().names or sorted(path.stem for path in SCRIPTS.glob("*.py"))
    PAGES.mkdir(exist_ok=True)
    for name in asked:
        script, began = SCRIPTS / f"{name}.py", time.perf_counter()
        cells = read_cells(script)
        for old in PAGES.glob(f"{name}-*.png"):
            old.unlink()
        run_cells(script, cells, PAGES)
        (PAGES / f"{name}.md").write_text(page_of(script, cells), encoding="utf-8")
        print(f"{name}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
