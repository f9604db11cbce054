"""Configuration files: TOML that users write, JSON that runs leave behind."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from spectral_dp.experiments.setting_types import SettingsError

#: The names that settings had in files of earlier versions.
_RENAMED = {
    "average": "ema_decay",
    "layer_norms": "layer_max_grad_norms",
    "physical_batch_size": "max_physical_batch_size",
    "views": "augmentation_multiplicity",
}


def read_file(path: str | Path) -> dict[str, Any]:
    """Reads settings from a TOML or JSON file, such as the ``config.json`` of a run; returns those it gives."""
    path = Path(path)
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{path} must hold settings by name, got a {type(values).__name__}")
    refuse_old_names([name.replace("-", "_") for name in values], str(path))
    return {name: value for name, value in values.items() if value is not None}


def refuse_old_names(names: Collection[str], source: str) -> None:
    """Raises ``SettingsError``, with the new names, if settings have names of earlier versions."""
    if old := [name for name in _RENAMED if name in names]:
        renamed = ", ".join(f"{name} is now {_RENAMED[name]}" for name in old)
        raise SettingsError(f"{renamed}: rename {'it' if len(old) == 1 else 'them'} in {source}")


def plain_value(text: str) -> Any:
    """Returns the value that TOML reads in a text, and the text itself where it reads none: a word without quotes."""
    try:
        return tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()
