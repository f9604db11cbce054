"""The pages of the documentation, and what is in them: code, commands, links."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: What people read. Pages of results are written by programs; their links are checked all the same.
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
WITH_RESULTS = [*PAGES, *sorted((ROOT / "results").rglob("*.md"))]

_FENCE = re.compile(r"^( *)(```+)(.*?)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
_EXEMPT = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)


def blocks(text, *languages):
    """The code of the blocks in these languages that are not exempt; a comment in the line above says why one is."""
    return [
        found[4]
        for found in _FENCE.finditer(text)
        if found[3].split(" ")[0] in languages and not _EXEMPT.search(text[: found.start()])
    ]


def prose(text):
    """The page without its blocks of code."""
    return _FENCE.sub("", text)


def commands(text):
    """The command lines of the shell blocks, as lists of words; a backslash at the end of a line goes on."""
    for block in blocks(text, "sh", "console", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line.removeprefix("$ "), comments=True):
                yield words


def mentioned_commands(text):
    """Calls of ``spectral-dp`` that are named within a sentence."""
    return [shlex.split(code) for code in re.findall(r"(?<!`)`(spectral-dp [^`\n]+)`(?!`)", prose(text))]


def links(text):
    """The relative links of a page, as pairs of a path (empty: this page) and an anchor (empty: none)."""
    text = re.sub(r"`[^`\n]*`", "", prose(text))
    return re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]*))?\)", text)


def anchors(text):
    """The anchors of the headings, as the site and the usual hosts of repositories make them."""
    headings = re.findall(r"^#+ +(.+?) *(?:\{.*\})?$", prose(text), flags=re.MULTILINE)
    return [re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings]
