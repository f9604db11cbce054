"""Tables that a narrow terminal shows in full: what is too wide goes on in the next line, and nothing is cut off."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

_BETWEEN = 2  # columns of the terminal from one column of the table to the next


def wrapping_table(
    headings: Sequence[str], lines: Sequence[Sequence[str]], *, width: int, title: str = "", caption: str = ""
) -> Table:
    """Returns a table whose columns break between words. If even the headings do not fit, each line is a list.

    Args:
        headings: One for each column.
        lines: The cells of each line.
        width: Columns of the terminal.
        title: What stands above the table.
        caption: What stands below it.
    """
    widths = _widths([[heading, *cells] for heading, *cells in zip(headings, *lines, strict=True)], width)
    table = Table(title=title or None, caption=caption or None, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.show_edge = False
    if widths is None:
        table.show_header = False
        table.add_column(overflow="fold")
        table.add_column(overflow="fold")
        for line in lines:
            for heading, cell in zip(headings, line, strict=True):
                table.add_row(heading, cell)
            table.add_row("", "")
        return table
    for heading, columns in zip(headings, widths, strict=True):
        table.add_column(heading, width=columns, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def print_wrapped(
    headings: Sequence[str], lines: Sequence[Sequence[str]], *, title: str = "", caption: str = ""
) -> None:
    """Prints the table as wide as the terminal allows."""
    console = Console()
    console.print(wrapping_table(headings, lines, width=console.width, title=title, caption=caption))


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The width of each column, its heading first; None if the words of the headings do not fit into the terminal."""
    room = width - _BETWEEN * len(columns)
    widths = [max(map(len, cells)) for cells in columns]
    for least in (
        [max(map(_longest_word, cells)) for cells in columns],
        [_longest_word(cells[0]) for cells in columns],
    ):
        while sum(widths) > room and any(have > need for have, need in zip(widths, least, strict=True)):
            spare = [have - need for have, need in zip(widths, least, strict=True)]
            widths[spare.index(max(spare))] -= 1
    return widths if sum(widths) <= room else None


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=1)
