"""Everything that a training run can be told, in one place: flags, configuration files and run directories all use it.

A field's type, default and help text are all that the command line needs to offer it as a flag. :class:`Settings` are
what a user asked for; :class:`ResolvedSettings` are what is run, and nothing about them is left open. The command that
reads settings resolves them, once.
"""
# ruff: noqa: RUF009 - _option makes a dataclass field

from __future__ import annotations

import copy
import json
import math
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from spectral_dp.relations import Relation

MethodName = Literal["spectral", "dpsgd", "opacus", "nonprivate"]

#: The names that settings had in files of earlier versions.
_RENAMED = {
    "average": "ema_decay",
    "layer_norms": "layer_max_grad_norms",
    "physical_batch_size": "max_physical_batch_size",
    "views": "augmentation_multiplicity",
}


class SettingsError(ValueError):
    """Settings that cannot be run, with what to change."""


def _option(default: Any, help: str, *, group: str, free: bool = False) -> Any:
    """A setting; a *free* one does not change what is computed, so a resumed run may have another value."""
    metadata = {"help": help, "group": group, "free": free}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The settings of a training run, checked one by one and against each other."""

    dataset: str = _option("digits", "Data set: digits, mnist, fashion-mnist, cifar10 or cifar100.", group="Data")
    data_path: str | None = _option(
        None, "File or directory with the official files, instead of the cache.", group="Data"
    )
    train_size: int | None = _option(None, "Train on this many samples only, a fixed random choice.", group="Data")
    test_size: int | None = _option(None, "Evaluate on this many held-out samples only.", group="Data")
    validation_size: int = _option(
        0,
        "For choosing settings: evaluate on this many training samples, left out of training, not on the test set.",
        group="Data",
    )
    image_size: int | None = _option(None, "Resize images to this many pixels a side.", group="Data")
    flip: bool = _option(False, "Augment by mirroring images at random.", group="Data")
    shift: int = _option(0, "Augment by shifting images by up to this many pixels.", group="Data")
    augmentation_multiplicity: int = _option(
        1, "Augmented views of each sample, whose gradients are averaged before clipping.", group="Data"
    )

    model: str = _option(
        "model1", "Network: model1, lenet5, model2, model3, or your own as package.module:factory.", group="Model"
    )
    activation: Literal["tanh", "relu"] | None = _option(
        None, "Activation function; tanh where the model has a choice.", group="Model"
    )
    block_size: int | None = _option(
        None, "Block size of block-circulant dense layers; 0 for dense ones (default: the model's).", group="Model"
    )
    dense_layers: list[str] = _option(
        [], "Name of a layer to leave dense, with --block-size. May be repeated.", group="Model"
    )
    last_block_size: int = _option(10, "Block size of the last dense layer, with --block-size.", group="Model")

    method: MethodName = _option("spectral", "What to train with; opacus is DP-SGD by Opacus itself.", group="Privacy")
    epsilon: float | None = _option(
        None, "Privacy budget: calibrates the noise (default: 2, unless --noise-multiplier is given).", group="Privacy"
    )
    delta: float = _option(1e-5, "The delta of the budget; keep it well below 1/N.", group="Privacy")
    noise_multiplier: float | None = _option(None, "Noise multiplier, in place of --epsilon.", group="Privacy")
    max_grad_norm: float = _option(1.0, "Clipping bound C of a sample's gradient.", group="Privacy")
    clipping: Literal["flat", "per_layer", "automatic"] = _option(
        "flat", "Clip all layers together, each by itself (C in total), or normalise.", group="Privacy"
    )
    layer_max_grad_norms: list[float] = _option(
        [],
        "Clipping bound of one layer, with per_layer clipping, in place of --max-grad-norm. Repeat, in their order.",
        group="Privacy",
    )
    noise_allocation: Literal["uniform", "optimal"] = _option(
        "uniform", "With per_layer clipping: the same noise everywhere, or the least in total.", group="Privacy"
    )
    accountant: Literal["pld", "rdp"] = _option("pld", "How privacy loss is accounted for.", group="Privacy")
    relation: Relation = _option(Relation.ADD_OR_REMOVE_ONE, "Which data sets are neighbours.", group="Privacy")

    conv_ratio: float | None = _option(
        None, "Fraction of a convolution's coefficients to drop (default: the model's).", group="Spectral-DP"
    )
    linear_ratio: float | None = _option(
        None,
        "The same for block-circulant layers, and dense ones fed by an image (default: the model's).",
        group="Spectral-DP",
    )
    layer_ratios: dict[str, float] = _option(
        {}, "Ratio of one layer, as NAME=RATIO; wins over the others. May be repeated.", group="Spectral-DP"
    )
    filter: Literal["low-pass", "adaptive", "annealed"] = _option(
        "low-pass",
        "Fixed; with gains learnt from what was released; or a ratio that falls to 0 during the run.",
        group="Spectral-DP",
    )
    conv_transform: Literal["fourier", "dct", "haar", "hadamard", "identity"] | None = _option(
        None, "Transform of convolution kernels (default: dct).", group="Spectral-DP"
    )
    support: Literal["kernel", "signal"] = _option(
        "kernel", "Spectrum of the kernel, or of the padded signal as in the paper.", group="Spectral-DP"
    )
    order: Literal["filter_then_clip", "clip_then_filter"] = _option(
        "filter_then_clip", "Order of filter and clip; the paper clips first.", group="Spectral-DP"
    )
    band: Literal["lowest", "box", "paper"] = _option(
        "lowest", "Which coefficients a ratio keeps.", group="Spectral-DP"
    )

    epochs: int = _option(20, "Epochs.", group="Training")
    batch_size: int = _option(256, "Expected batch size.", group="Training")
    optimizer: Literal["sgd", "adam"] = _option("sgd", "Optimizer.", group="Training")
    learning_rate: float = _option(0.5, "Learning rate at the start.", group="Training")
    momentum: float = _option(0.0, "Momentum of SGD.", group="Training")
    weight_decay: float = _option(0.0, "Weight decay.", group="Training")
    schedule: Literal["constant", "cosine", "linear"] = _option(
        "constant", "How the learning rate falls over the run: not at all, or to zero.", group="Training"
    )
    ema_decay: float = _option(
        0.0,
        "Decay of an exponential moving average of the weights, which is then the result; 0 for none.",
        group="Training",
    )

    seed: int = _option(0, "Seed of initialisation and augmentation.", group="Execution")
    reproducible: bool = _option(
        False, "Draw noise and batches from the seed, too. The run is then NOT private.", group="Execution"
    )
    max_physical_batch_size: int | None = _option(
        None,
        "The most samples that go through the model at once; saves memory, changes nothing else.",
        group="Execution",
        free=True,
    )
    device: str = _option("cpu", "Torch device to train on.", group="Execution", free=True)
    threads: int | None = _option(None, "Threads of torch (default: torch's).", group="Execution", free=True)
    evaluate_every: int = _option(1, "Evaluate and save a checkpoint every so many epochs.", group="Execution")
    unsafe_diagnostics: bool = _option(
        False, "Record figures of the raw private data (training loss, norms). NOT to be published.", group="Execution"
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f.name, self.hints()[f.name], getattr(self, f.name)))
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise SettingsError("give epsilon or noise_multiplier, not both")
        positive = (
            "epochs",
            "batch_size",
            "augmentation_multiplicity",
            "evaluate_every",
            "max_grad_norm",
            "learning_rate",
        )
        for name in positive:
            _require(name, getattr(self, name), getattr(self, name) > 0, "positive")
        for name in ("train_size", "test_size", "image_size", "max_physical_batch_size", "threads", "epsilon"):
            value = getattr(self, name)
            _require(name, value, value is None or value > 0, "positive")
        for name in ("momentum", "ema_decay"):
            _require(name, getattr(self, name), 0 <= getattr(self, name) < 1, "in [0, 1)")
        for name in ("shift", "weight_decay", "validation_size"):
            _require(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        _require("delta", self.delta, 0 < self.delta < 1, "between 0 and 1")
        _require("seed", self.seed, 0 <= self.seed < 2**31, "from 0 to 2^31 - 1")
        if self.optimizer == "adam" and self.momentum:
            raise SettingsError(f"momentum {self.momentum} is SGD's: leave it out with adam, which has its own")
        if self.layer_max_grad_norms and self.clipping != "per_layer":
            raise SettingsError(f"layer_max_grad_norms needs clipping per_layer, not {self.clipping}")
        if self.noise_allocation == "optimal" and self.clipping != "per_layer":
            raise SettingsError(f"noise_allocation optimal needs clipping per_layer, not {self.clipping}")
        if self.noise_multiplier is not None:
            _require("noise_multiplier", self.noise_multiplier, self.noise_multiplier >= 0, "at least 0")
        ratios = {"conv_ratio": self.conv_ratio, "linear_ratio": self.linear_ratio, **self.layer_ratios}
        for name, ratio in ratios.items():
            _require(name, ratio, ratio is None or 0 <= ratio < 1, "in [0, 1): the fraction to drop")

    @classmethod
    @cache
    def hints(cls) -> dict[str, Any]:
        """Returns the type of every setting."""
        return typing.get_type_hints(cls)

    @property
    def sensitivity_bound(self) -> float:
        """How far one record can move the clipped sum: C, or the root of the sum of squares of the layers' bounds."""
        return math.hypot(*self.layer_max_grad_norms) if self.layer_max_grad_norms else self.max_grad_norm

    @property
    def is_private(self) -> bool:
        """Whether the method is a private one."""
        return self.method != "nonprivate"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as for JSON."""
        return asdict(self) | {"relation": str(self.relation)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "the configuration") -> Self:
        """Builds settings from plain values; names that are not settings are refused."""
        known = [f.name for f in fields(cls)]
        values = {name.replace("-", "_"): value for name, value in values.items()}
        _refuse_old_names(values, source)
        if unknown := sorted(set(values) - set(known)):
            raise SettingsError(f"{source} has unknown settings {', '.join(unknown)}: choose from {', '.join(known)}")
        try:
            return cls(**values)
        except SettingsError as error:
            raise SettingsError(f"{source}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Settings(_Options):
    """A training run as a user asks for it: some defaults depend on other settings, and are open until resolved."""

    def relevant(self) -> Self:
        """Returns the settings with those that the method does not use at their defaults."""
        unused = {"spectral": (), "nonprivate": ("Spectral-DP", "Privacy")}.get(self.method, ("Spectral-DP",))
        defaults = type(self)()
        return replace(
            self,
            **{
                f.name: getattr(defaults, f.name)
                for f in fields(self)
                if f.metadata["group"] in unused and f.name != "method"
            },
        )

    def resolved(self) -> ResolvedSettings:
        """Returns the settings with every default that depends on others filled in.

        Raises:
            ValueError: There is no such model.
        """
        from spectral_dp import models  # late: torch takes a second

        values, recommended = self.to_dict(), models.entry(self.model).spectral
        undecided = all(values[name] in (None, {}, []) for name in (*_OPEN, "layer_ratios", "dense_layers"))
        if self.method == "spectral" and undecided:
            values |= recommended  # together or not at all: they were measured together
        values |= {name: 0 for name in _OPEN if values[name] is None}
        if self.is_private and self.epsilon is None and self.noise_multiplier is None:
            values["epsilon"] = 2.0
        return ResolvedSettings(**values)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(_Options):
    """A training run as it is made: a private one has an epsilon or a noise multiplier, and every ratio is a number."""

    block_size: int
    conv_ratio: float
    linear_ratio: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_private and self.epsilon is None and self.noise_multiplier is None:
            raise SettingsError(f"method {self.method} needs an epsilon or a noise_multiplier")

    def essential(self) -> dict[str, Any]:
        """Returns the settings that decide what is computed, not where and how fast, as plain values."""
        return {name: value for name, value in self.to_dict().items() if name not in _FREE}


_OPEN = ("block_size", "conv_ratio", "linear_ratio")
_FREE = {f.name for f in fields(Settings) if f.metadata["free"]}


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
    _refuse_old_names([name.replace("-", "_") for name in values], str(path))
    return {name: value for name, value in values.items() if value is not None}


def _refuse_old_names(names: Collection[str], source: str) -> None:
    if old := [name for name in _RENAMED if name in names]:
        renamed = ", ".join(f"{name} is now {_RENAMED[name]}" for name in old)
        raise SettingsError(f"{renamed}: rename {'it' if len(old) == 1 else 'them'} in {source}")


def kind_of(hint: Any) -> Any:
    """Returns the type of a setting without the None of an optional one."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return next(member for member in members if member is not type(None))


def _checked(name: str, hint: Any, value: Any) -> Any:
    """Returns the value in the type of its setting, or says what that is."""
    kind = kind_of(hint)
    if value is None and kind is not hint:
        return None
    if kind is Relation or typing.get_origin(kind) is Literal:
        listed = tuple(Relation) if kind is Relation else typing.get_args(kind)
        if value not in listed:
            raise SettingsError(f"{name} must be one of {', '.join(listed)}, got {value!r}")
        return Relation(value) if kind is Relation else value
    if kind is float and type(value) is int:
        return float(value)
    if kind is float and type(value) is float and not math.isfinite(value):
        raise SettingsError(f"{name} must be finite, got {value}")
    if typing.get_origin(kind) is dict:
        if isinstance(value, dict) and all(type(v) in (int, float) for v in value.values()):
            return {str(k): float(v) for k, v in value.items()}
        raise SettingsError(f"{name} must map layer names to numbers, got {value!r}")
    if typing.get_origin(kind) is list:
        element = typing.get_args(kind)[0]
        accepted = (int, float) if element is float else (str,)
        if isinstance(value, list) and all(type(v) in accepted for v in value):
            return [element(v) for v in value]
        what = "numbers" if element is float else "layer names"
        raise SettingsError(f"{name} must be a list of {what}, got {value!r}")
    if type(value) is not kind:
        raise SettingsError(f"{name} must be of type {kind.__name__}, got {value!r}")
    return value


def _require(name: str, value: Any, holds: bool, what: str) -> None:
    if not holds:
        raise SettingsError(f"{name} must be {what}, got {value}")
