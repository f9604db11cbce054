"""The reference of the command line, from the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from spectral_dp.cli import app

_INTRODUCTION = """# Command line

The command `spectral-dp` needs the extra `cli` (`pip install 'spectral-dp[cli]'`). It is a thin front end: each command
parses flags, calls `experiments`, `audit`, `data`, `features` or `accounting`, and prints. Every setting of a run is a
flag of `train`, `compare` and `audit`, and a line of the file that `--config` names. This page is made from the
commands, so it is what `--help` says. [Train and compare from the command line](../training.md) shows how they are used
together.
"""


def command_line_page() -> str:
    """Returns the page, in Markdown."""
    return "\n".join([_INTRODUCTION, *(_section(name, command) for name, command in commands())])


def commands(group: Any = None, name: str = "spectral-dp") -> Iterator[tuple[str, Any]]:
    """Returns every command by the words that call it, such as ``spectral-dp data get``."""
    group = typer.main.get_command(app) if group is None else group
    for word, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def _section(name: str, command: Any) -> str:
    text, _, examples = (command.help or "").partition("\b")
    lines = [f"\n## {name}\n", *(line.strip() for line in text.strip().splitlines())]
    if examples.strip():
        lines += ["", "```sh", *(line.strip() for line in examples.strip().splitlines()), "```"]
    context = typer.Context(command)
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        panel = parameter.rich_help_panel or ("Arguments" if _is_argument(parameter) else "Options")
        panels.setdefault(panel, []).append(_row(parameter, context))
    for panel, rows in panels.items():
        lines += ["", f"| {_cell(panel)} | |", "|---|---|", *rows]
    return "\n".join(lines)


def _row(parameter: Any, context: typer.Context) -> str:
    if _is_argument(parameter):
        names = [parameter.metavar or parameter.name.upper()]
    else:
        kind = parameter.display_type(context).strip("<>").removesuffix(" range").replace("|", "/")
        value = parameter.metavar or kind.upper()
        names = [name if parameter.is_flag else f"{name} {value}" for name in parameter.opts + parameter.secondary_opts]
    shown = parameter.show_default if isinstance(parameter.show_default, str) else _default(parameter)
    default = f" Default: `{shown}`." if shown else ""
    return f"| {_cell(', '.join(f'`{name}`' for name in names))} | {_cell((parameter.help or '') + default)} |"


def _is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def _default(parameter: Any) -> str:
    shows = parameter.default not in (None, [], ()) and not isinstance(parameter.default, bool)
    return str(parameter.default) if shows and not callable(parameter.default) else ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
