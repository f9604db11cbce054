"""The same tables for a terminal and for a Markdown page, and the note that says where its numbers come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from entries import Entry, Standing
from made_by import as_text
from rich.markup import escape
from rich.table import Table


@dataclass
class Sheet:
    """A table; ``sections`` of rows are set apart in a terminal."""

    title: str
    headings: Sequence[str]
    sections: Sequence[Sequence[Sequence[str]]]

    def for_terminal(self) -> Table:
        table = Table(*map(escape, self.headings), title=escape(self.title))
        for section in self.sections:
            for row in section:
                table.add_row(*map(escape, row))
            table.add_section()
        return table

    def as_markdown(self) -> str:
        rows = [self.headings, ["---"] * len(self.headings), *(row for section in self.sections for row in section)]
        return "\n".join([f"## {self.title}", "", *("| " + " | ".join(row) + " |" for row in rows)])


def steps_sheet(entries: Iterable[Entry], title: str, name: str, size: str) -> Sheet:
    """All that was measured; ``name`` and ``size`` say what an entry's are."""
    headings = (name, size, "contestant", "ms a step", "time / plain", "time / best Opacus", "MB", "MB / plain")
    sections = [[_cells(entry, standing) for standing in entry.standings()] for entry in entries]
    return Sheet(f"{title}, medians [quartiles]", headings, sections)


def _cells(entry: Entry, standing: Standing) -> list[str]:
    head = [entry.name, str(entry.size), standing.contestant]
    if standing.time is None:
        return [*head, standing.failure or "", *[""] * 4]
    digits = 1 if standing.time.median >= 0.01 else 2
    return [
        *head,
        standing.time.text(1e3, digits) + (f", then {standing.failure}" if standing.failure else ""),
        standing.over_plain.text() if standing.over_plain else "",
        standing.over_opacus.text() if standing.over_opacus else "",
        f"{standing.memory_mb:.0f}",
        f"{standing.memory_over_plain:.2f}" if standing.memory_over_plain else "",
    ]


def sources(entries: Iterable[Entry]) -> str:
    """Who made which entries: one line where all are of one run."""
    runs: dict[str, list[str]] = {}
    for entry in entries:
        runs.setdefault(as_text(entry.made_by), []).append(f"{entry.name} {entry.size}")
    if len(runs) == 1:
        return "Measured by " + next(iter(runs)) + "."
    return "\n".join(["Measured by several runs:", "", *(f"* {'; '.join(of)}: {run}" for run, of in runs.items())])


def markdown(title: str, paragraphs: Iterable[str]) -> str:
    return "\n\n".join([f"# {title}", *paragraphs]) + "\n"
