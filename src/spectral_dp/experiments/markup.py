"""Pieces of an HTML page. Plain text goes in, and is escaped here; arguments called ``inner`` are markup already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any


def heading(level: int, text: str) -> str:
    """A heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph, of a class where ``kind`` names one."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def box(kind: str, inner: str) -> str:
    """A box that stands out: ``guaranteed``, ``warning`` or ``unsafe``."""
    return f'<div class="box {kind}">{inner}</div>'


def bullets(texts: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def details(title: str, inner: str) -> str:
    """Something to be opened by who wants to see it."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def side_by_side(parts: Iterable[str]) -> str:
    """Figures or tables in a row, as far as there is room."""
    return f'<div class="row">{"".join(f"<div>{inner}</div>" for inner in parts)}</div>'


def figure(svg: str, caption: str) -> str:
    """A picture with its caption."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], note: str) -> str:
    """A table with a heading to each column and row."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return _scrolling("wide", f"<thead><tr>{head}</tr></thead>", rows, note)


def pairs(values: Mapping[str, str], note: str) -> str:
    """Names and values, one below the other."""
    return _scrolling("pairs", "", values.items(), note)


def _scrolling(kind: str, head: str, rows: Iterable[Sequence[Any]], note: str) -> str:
    """A table that scrolls by itself where the page is too narrow for it; its note does not."""
    body = "".join(
        f'<tr><th scope="row">{escape(str(first))}</th>' + "".join(f"<td>{escape(str(x))}</td>" for x in rest) + "</tr>"
        for first, *rest in rows
    )
    inner = f'<table class="{kind}">{head}<tbody>{body}</tbody></table>'
    region = f'<div class="scroll" role="region" aria-label="{escape(note)}" tabindex="0">{inner}</div>'
    return region + paragraph(note, "note")
