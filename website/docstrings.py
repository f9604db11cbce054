"""Docstrings as Markdown: roles (``:func:`perturb```) become links, doctests blocks of code, and tables tables."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Module, NameResolutionError, Object

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc|obj):`(~?)([^`]+)`")
_DOCTEST = re.compile(r"^( *)>>> .*(?:\n *\S.*)*", re.MULTILINE)  # up to the next empty line
_TABLE = re.compile(r"^(=+  =+)\n(.+)\n\1\n((?:.+\n)+?)\1$", re.MULTILINE)  # two columns, as there are


class DocstringsAsMarkdown(Extension):
    """Rewrites every docstring when it is read, and shows what a room re-exports only where it is defined."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Forgets the lists of public names of the package and its folders: their modules are on the same page."""
        modules = [pkg]
        while modules:
            module = modules.pop()
            modules += [each for each in module.modules.values() if isinstance(each, Module)]
            if module.is_init_module:
                module.exports = None

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrites the docstring of one object."""
        if obj.docstring is not None:
            text = _TABLE.sub(_table, obj.docstring.value)
            text = _ROLE.sub(lambda found: _linked(obj, *found.groups()), text)
            obj.docstring.value = _DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text).replace("::\n", ":\n")


def _linked(obj: Object, short: str, name: str) -> str:
    shown = name.rpartition(".")[2] if short else name
    try:
        target = name if name.startswith("spectral_dp.") else obj.resolve(name.removesuffix("()"))
    except NameResolutionError:
        return f"`{shown}`"
    return f'<autoref identifier="{target}" optional><code>{shown}</code></autoref>'  # optional: no page, no link


def _table(found: re.Match[str]) -> str:
    width = found[1].index(" ") + 2
    rows = [f"| {line[:width].strip()} | {line[width:].strip()} |" for line in [found[2], *found[3].splitlines()]]
    return "\n".join([rows[0], "|---|---|", *rows[1:]])
