"""Which settings are searched: ranges and choices, and the list of candidates that they give.

Ranges are written in TOML, in a table ``search`` of the configuration, or as flags::

    [search]
    learning_rate = { low = 0.1, high = 10, log = true }     # --search learning_rate=0.1..10:log
    batch_size = [256, 512, 1024]                            # --search batch_size=256,512,1024
    "layer_ratios.fc1" = { low = 0.0, high = 0.9 }           # --search layer_ratios.fc1=0..0.9

The candidates depend on the ranges, their number, the sampler and a seed. They depend on no record, so they are public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import qmc

from spectral_dp.experiments.setting_files import plain_value
from spectral_dp.experiments.setting_types import kind_of
from spectral_dp.experiments.settings import ResolvedSettings, Settings, SettingsError

Sampler = Literal["random", "quasi-random"]

#: Settings that no search may change: which records there are, what is promised, and where it is computed.
FIXED = (
    *("dataset", "data_path", "image_folder", "csv", "text_column", "label_column", "csv_encoding", "image_size"),
    *("train_size", "test_size", "validation_size", "epsilon", "delta", "relation", "accountant", "seed"),
    *("reproducible", "unsafe_diagnostics", "device", "threads", "evaluate_every", "max_physical_batch_size"),
)


@dataclass(frozen=True)
class Dimension:
    """One searched setting: a range from ``low`` to ``high``, or a choice among ``values``.

    Attributes:
        name: The setting; that of one layer or option as ``layer_ratios.fc1``.
        low: The lower end of the range.
        high: The upper end, which belongs to it.
        log: Whether the logarithm is uniform rather than the value.
        values: The values to choose from, in place of a range.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    values: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        setting, _, part = self.name.partition(".")
        if setting in FIXED or setting not in Settings.hints():
            raise SettingsError(f"search: {self.name} is no setting that can be searched")
        if bool(part) != (kind_of(Settings.hints()[setting]) in _TABLES):
            raise SettingsError(f"search: write {setting} {'without' if part else 'with'} the name of a part")
        if self.values:
            return
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise SettingsError(f"search: {self.name} needs low < high, got {self.low:g} and {self.high:g}")
        if self.log and self.low <= 0:
            raise SettingsError(f"search: {self.name} is searched by its logarithm, so low must be above 0")
        if not part and kind_of(Settings.hints()[setting]) not in (int, float):
            raise SettingsError(f"search: {self.name} is no number: list the values to choose from")

    def value(self, place: float) -> Any:
        """Returns the value at a place in [0, 1)."""
        if self.values:
            return self.values[int(place * len(self.values))]
        setting, _, part = self.name.partition(".")
        is_whole = not part and kind_of(Settings.hints()[setting]) is int
        low, high = (self.low - 0.5, self.high + 0.5) if is_whole and not self.log else (self.low, self.high)
        found = low * (high / low) ** place if self.log else low + place * (high - low)
        return min(max(round(found), math.ceil(self.low)), math.floor(self.high)) if is_whole else found


_TABLES = (dict[str, float], dict[str, bool | int | float | str])


@dataclass(frozen=True)
class SearchSpace:
    """The searched settings, and how the list of candidates is made.

    Attributes:
        dimensions: The searched settings.
        sampler: ``"random"``, or ``"quasi-random"`` for a scrambled Sobol sequence, which fills the space evenly.
        seed: Seed of the candidates. It is public.
    """

    dimensions: tuple[Dimension, ...]
    sampler: Sampler = "quasi-random"
    seed: int = 0

    def __post_init__(self) -> None:
        names = [dimension.name for dimension in self.dimensions]
        if not names:
            raise SettingsError("nothing to search: give ranges, such as --search learning_rate=0.1..10:log")
        if len(set(names)) < len(names):
            raise SettingsError(f"search: a setting is given twice among {', '.join(names)}")

    def points(self, count: int) -> list[dict[str, Any]]:
        """Returns the values of the searched settings of each candidate, by name."""
        width = len(self.dimensions)
        if self.sampler == "random":
            places = np.random.default_rng(self.seed).random((count, width))
        else:
            places = qmc.Sobol(width, rng=self.seed).random_base2(max(count - 1, 1).bit_length())[:count]
        return [
            {d.name: d.value(place) for d, place in zip(self.dimensions, row, strict=True)} for row in places.tolist()
        ]

    def candidates(self, given: Mapping[str, Any], count: int) -> list[ResolvedSettings]:
        """Returns the settings of each candidate; those that are not searched are the given ones."""
        return [with_point(given, point) for point in self.points(count)]


def with_point(given: Mapping[str, Any], point: Mapping[str, Any]) -> ResolvedSettings:
    """Returns the given settings with the values of one candidate in the place of theirs."""
    values: dict[str, Any] = {name.replace("-", "_"): value for name, value in given.items()}
    for name, value in point.items():
        setting, _, part = name.partition(".")
        values[setting] = values.get(setting, {}) | {part: value} if part else value
    return Settings.from_dict(values, source=f"the candidate {dict(point)}").relevant().resolved()


def read_dimensions(table: Mapping[str, Any]) -> list[Dimension]:
    """Reads the table ``search`` of a configuration."""
    found = []
    for name, entry in table.items():
        name = name.replace("-", "_")
        if isinstance(entry, list) and entry:
            found.append(Dimension(name, values=tuple(entry)))
        elif isinstance(entry, dict) and {"low", "high"} <= set(entry) <= {"low", "high", "log"}:
            if not all(type(entry[end]) in (int, float) for end in ("low", "high")):
                raise SettingsError(f"search: low and high of {name} must be numbers, got {entry!r}")
            found.append(Dimension(name, float(entry["low"]), float(entry["high"]), entry.get("log", False) is True))
        else:
            raise SettingsError(f"search: {name} must be a list of values, or {{low, high, log}}, got {entry!r}")
    return found


def parse_dimensions(flags: Sequence[str]) -> list[Dimension]:
    """Reads flags such as ``learning_rate=0.1..10:log`` and ``optimizer=sgd,adam``."""
    table: dict[str, Any] = {}
    for flag in flags:
        name, equals, text = (part.strip() for part in flag.partition("="))
        if not (name and equals and text) or name in table:
            raise SettingsError(f"--search {flag}: write NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A,B,C, once a name")
        low, dots, high = text.removesuffix(":log").partition("..")
        if dots:
            table[name] = {"low": plain_value(low), "high": plain_value(high), "log": text.endswith(":log")}
        else:
            table[name] = [plain_value(part) for part in text.split(",")]
    return read_dimensions(table)
