"""What commands share: the settings of a run as flags, so that a new one is a flag everywhere, errors and results."""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import Field, fields
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


def with_settings(command: Callable[..., None], only: Collection[str] = ()) -> Callable[..., None]:
    """Gives a command a flag for every setting, and plain errors; it receives what was given, as ``given``.

    Flags win over the file of ``--config``, which a command that takes ``only`` some of the settings does not have.
    """
    own = inspect.signature(command, eval_str=True).parameters
    flags = {setting.name: _flag(setting) for setting in fields(Settings) if not only or setting.name in only}

    def run(**values: Any) -> None:
        config = values.pop("config", None)
        with plain_errors():
            given = read_file(config) if config is not None else {}
            for name in flags:
                value = values.pop(name)
                if value is not None and value != []:
                    given[name] = _elements(name, value) if name in _REPEATED else value
            command(given=given, **values)

    file = typer.Option(help="Settings from a TOML file, or the config.json of a run; flags win.")
    config = [] if only else [_parameter("config", Annotated[Path | None, file])]
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.values() if p.name != "given"]
    taken = [*kept, *config, *flags.values()]
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
        flag, options["metavar"] = flag.removesuffix("s"), _REPEATED[name][0]
        annotation = (kind if kind == list[float] else list[str]) | None
    else:
        annotation = kind | None
    return _parameter(name, Annotated[annotation, typer.Option(flag, **options)])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def named_values(flag: str, texts: Sequence[str] | None, form: str, kind: Callable[[str], Any] = str) -> dict[str, Any]:
    """Returns the values of a flag that is given once for each of them, by name.

    Args:
        flag: The flag, for an error.
        texts: What it was given.
        form: How it is to be written, with an example, for an error.
        kind: Makes a value of its text.
    """
    found = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        try:
            if not (name and value):
                raise ValueError
            found[name] = kind(value)
        except ValueError:
            raise typer.BadParameter(f"{flag} {text}: write it as {form}") from None
    return found


def _elements(setting: str, texts: list[Any]) -> list[Any] | dict[str, Any]:
    form, example, kind = _REPEATED[setting]
    flag = f"--{setting.replace('_', '-').removesuffix('s')}"
    return texts if kind is None else named_values(flag, texts, f"{form}, such as {example}", kind)


def _number_or_text(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


#: Settings whose flag is given once for each element: what an element looks like, and, of those with names, an example
#: and what makes a value of its text.
_REPEATED: dict[str, tuple[str, str, Callable[[str], Any] | None]] = {
    "dense_layers": ("NAME", "", None),
    "layer_max_grad_norms": ("C", "", None),
    "layer_ratios": ("NAME=RATIO", "fc1=0.5", float),
    "layer_rates": ("NAME=FACTOR", "fc1=0.5", float),
    "feature_options": ("NAME=VALUE", "scales=3", _number_or_text),
}
