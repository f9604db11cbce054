"""What commands share: the settings of a run as flags, so that a new one is a flag everywhere, errors and results."""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import Field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from spectral_dp.errors import SpectralDPError
from spectral_dp.experiments.setting_files import read_file
from spectral_dp.experiments.setting_types import kind_of
from spectral_dp.experiments.settings import Settings

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else; what is infinite is null.")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]

#: Settings whose flag is given once for each element, and what an element looks like.
_REPEATED = {
    "dense_layers": "NAME",
    "layer_max_grad_norms": "C",
    "layer_ratios": "NAME=RATIO",
    "layer_rates": "NAME=FACTOR",
    "feature_options": "NAME=VALUE",
}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command a flag for every setting, and plain errors; it receives what was given, as ``given``.

    Flags win over the file of ``--config``.
    """
    own = inspect.signature(command, eval_str=True).parameters
    flags = {setting.name: _flag(setting) for setting in fields(Settings)}

    def run(**values: Any) -> None:
        config = values.pop("config")
        with plain_errors():
            given = read_file(config) if config is not None else {}
            for name in flags:
                value = values.pop(name)
                if value is not None and value != []:
                    given[name] = _PAIRS[name](value) if name in _PAIRS else value
            command(given=given, **values)

    config = typer.Option(help="Settings from a TOML file, or the config.json of a run; flags win.")
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values() if p.name != "given"]
    taken = [*kept, _parameter("config", Annotated[Path | None, config]), *flags.values()]
    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in taken}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def print_result(value: Any, table: RenderableType, as_json: bool) -> None:
    """Prints what a command found: for people, or for programs."""
    if as_json:
        typer.echo(json.dumps(value, indent=2, allow_nan=False))
    else:
        Console().print(table)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Warnings as lines on stderr; what the library refuses as an error of one line, without a traceback.

    Exit code 2 for what the user asked for (settings, directories), 1 for what went wrong (disk, network). With
    ``SPECTRAL_DP_TRACEBACK`` set, errors are shown with where they come from: a model of one's own may be the place.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = _show_warning
        try:
            yield
        except (SpectralDPError, ValueError, TypeError) as error:
            if os.environ.get("SPECTRAL_DP_TRACEBACK"):
                raise
            _fail(str(error), 2)
        except OSError as error:
            named = f"{error.filename}: " if error.filename else ""
            _fail(f"{named}{error.strerror or error}", 1)


def _fail(message: str, code: int) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code) from None


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _flag(setting: Field[Any]) -> inspect.Parameter:
    name, kind, metadata = setting.name, kind_of(Settings.hints()[setting.name]), setting.metadata
    options: dict[str, Any] = {"help": metadata["help"], "rich_help_panel": metadata["group"], "show_default": False}
    if isinstance(setting.default, str | int | float) and not isinstance(setting.default, bool):
        options["show_default"] = str(setting.default)  # the flag's own is None: not given
    flag = f"--{name.replace('_', '-')}"
    annotation: Any
    if kind is bool:
        annotation, flag = bool | None, f"{flag}/--no-{flag[2:]}"
    elif name in _REPEATED:
        flag, options["metavar"] = flag.removesuffix("s"), _REPEATED[name]
        annotation = (kind if kind == list[float] else list[str]) | None
    else:
        annotation = kind | None
    return _parameter(name, Annotated[annotation, typer.Option(flag, **options)])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _layer_numbers(flag: str, pairs: list[str]) -> dict[str, float]:
    numbers = {}
    for pair in pairs:
        name, equals, number = pair.partition("=")
        try:
            numbers[name] = float(number)
        except ValueError:
            equals = ""
        if not (name and equals):
            raise typer.BadParameter(
                f"{flag} {pair}: write it as NAME={flag.rpartition('-')[2].upper()}, such as fc1=0.5"
            )
    return numbers


def named_values(pairs: list[str]) -> dict[str, int | float | str]:
    """Returns options that were given as NAME=VALUE; what reads as a number is one."""
    options: dict[str, int | float | str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise typer.BadParameter(f"--feature-option {pair}: write it as NAME=VALUE, such as scales=3")
        options[name] = value
        for kind in (float, int):
            with suppress(ValueError):
                options[name] = kind(value)
    return options


_PAIRS: dict[str, Callable[[list[str]], Any]] = {
    "layer_ratios": partial(_layer_numbers, "--layer-ratio"),
    "layer_rates": partial(_layer_numbers, "--layer-rate"),
    "feature_options": named_values,
}
