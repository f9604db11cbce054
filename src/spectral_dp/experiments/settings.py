"""The settings of a training run: which go together, and the defaults that depend on others.

:class:`Settings` are what a user asked for; :class:`ResolvedSettings` are what is run, and nothing about them is left
open. The command that reads settings resolves them, once. Their names, types and help texts are in ``setting_options``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from spectral_dp.experiments.setting_options import Options
from spectral_dp.experiments.setting_types import SettingsError as SettingsError  # what most modules raise of it

#: Methods that make a linear head in a single release of cached features, without steps.
ONE_SHOT = ("class-means", "least-squares")

#: Settings that say where records of the user's own are, and what the data set is called then.
_OWN_DATA = {"image_folder": "image-folder", "csv": "csv"}


_POSITIVE = (
    *("epochs", "batch_size", "augmentation_multiplicity", "evaluate_every", "max_grad_norm", "learning_rate"),
    *("train_size", "test_size", "image_size", "max_physical_batch_size", "threads", "epsilon"),
    *("feature_groups", "feature_noise_multiplier", "feature_rank", "feature_channels", "feature_damp"),
    *("feature_prior_images", "lora_rank", "feature_scale"),
)
_NOT_NEGATIVE = ("shift", "weight_decay", "validation_size", "noise_multiplier", "feature_power")

#: Which values settings may have, and that in words; None, where a setting may be left open, always.
_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_POSITIVE, lambda value: value > 0, "positive"),
    (("momentum", "ema_decay"), lambda value: 0 <= value < 1, "in [0, 1)"),
    (_NOT_NEGATIVE, lambda value: value >= 0, "at least 0"),
    (("text_length",), lambda value: 2 <= value <= 512, "from 2 to 512"),
    (("head_dimensions",), lambda value: 1 <= value <= 256, "from 1 to 256"),
    (("feature_exponent",), lambda value: 0 < value <= 1, "above 0 and at most 1"),
    (("delta", "gradient_filter_gain"), lambda value: 0 < value < 1, "between 0 and 1"),
    (("seed",), lambda value: 0 <= value < 2**31, "from 0 to 2^31 - 1"),
)


class _CheckedOptions(Options):
    """The settings of a training run, checked against each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise SettingsError("give epsilon or noise_multiplier, not both")
        self._check_source()
        for names, is_within, words in _RANGES:
            for name in names:
                if (value := getattr(self, name)) is not None and not is_within(value):
                    raise SettingsError(f"{name} must be {words}, got {value}")
        if self.optimizer != "sgd" and self.momentum:
            raise SettingsError(
                f"momentum {self.momentum} is SGD's: leave it out with {self.optimizer}, which has its own"
            )
        if self.gradient_filter_gain is not None and self.gradient_filter == "none":
            raise SettingsError("gradient_filter_gain needs a gradient_filter: low-pass or kalman")
        if self.layer_max_grad_norms and self.clipping != "per_layer":
            raise SettingsError(f"layer_max_grad_norms needs clipping per_layer, not {self.clipping}")
        if self.noise_allocation == "optimal" and self.clipping != "per_layer":
            raise SettingsError(f"noise_allocation optimal needs clipping per_layer, not {self.clipping}")
        ratios = {"conv_ratio": self.conv_ratio, "linear_ratio": self.linear_ratio}
        ratios |= {"feature_ratio": self.feature_ratio, **self.layer_ratios}
        if self.feature_rank and self.feature_channels:
            raise SettingsError(
                "feature_rank projects all numbers of a record, feature_channels its channels: give one"
            )
        is_projected = self.feature_rank or self.feature_channels
        if self.feature_gains == "private" and not self.feature_rank:
            raise SettingsError(
                "feature_gains private are those of axes: give feature_rank, how many axes features are projected on"
            )
        is_changed = is_projected or self.feature_length == "unit" or self.feature_exponent != 1
        if is_changed and (self.feature_norm == "private" or (self.feature_norm == "public" and not is_projected)):
            raise SettingsError(
                f"feature_norm {self.feature_norm} is for features as they are, but a projection (feature_rank, "
                "feature_channels), unit length or feature_exponent change them before: use feature_norm group or "
                "none, or public with a projection, which then divides by deviations of generated images"
            )
        if any(not 0 <= decay < 1 for decay in self.ema_candidates):
            raise SettingsError(f"ema_candidates must be in [0, 1), got {self.ema_candidates}")
        if self.ema_candidates and not self.validation_size:
            raise SettingsError(
                "ema_candidates are compared on records that are left out of training, not on the test set: give "
                "validation_size"
            )
        for name, factor in self.layer_rates.items():
            if factor < 0:
                raise SettingsError(f"layer_rates: the factor of {name} must be at least 0, got {factor}")
        for name, ratio in ratios.items():
            if ratio is not None and not 0 <= ratio < 1:
                raise SettingsError(f"{name} must be in [0, 1): the fraction to drop, got {ratio}")

    @property
    def _own_data(self) -> list[str]:
        return [name for name in _OWN_DATA if getattr(self, name) is not None]

    def _check_source(self) -> None:
        own = self._own_data
        if len(own) > 1 or (own and self.data_path is not None):
            raise SettingsError(f"give one of data_path, {', '.join(_OWN_DATA)}: each says where the records are")
        if own and self.dataset not in ("digits", _OWN_DATA[own[0]]):
            raise SettingsError(f"give dataset or {own[0]}, not both: got {self.dataset} and {getattr(self, own[0])}")
        if not own and self.dataset in _OWN_DATA.values():
            raise SettingsError(
                f"the data set {self.dataset} is your own: say where it is with {' or '.join(_OWN_DATA)}"
            )


@dataclass(frozen=True, kw_only=True)
class Settings(_CheckedOptions):
    """A training run as a user asks for it: some defaults depend on other settings, and are open until resolved."""

    def relevant(self) -> Self:
        """Returns the settings with those that the method does not use at their defaults."""
        unused = {"spectral": (), "nonprivate": ("Spectral-DP", "Privacy")} | dict.fromkeys(ONE_SHOT, _STEPS_ONLY)
        groups = unused.get(self.method, ("Spectral-DP",))
        names = [f.name for f in fields(self) if {f.name, f.metadata["group"]} & {*groups} and f.name != "method"]
        defaults = type(self)()
        return replace(self, **{name: getattr(defaults, name) for name in names})

    def resolved(self) -> ResolvedSettings:
        """Returns the settings with every default that depends on others filled in.

        Raises:
            ValueError: There is no such model, or there are no such features.
        """
        from spectral_dp import features, models, pretrained  # late: torch takes a second

        entry = models.entry(self.model)
        named = {"dataset": _OWN_DATA[self._own_data[0]]} if self._own_data else {}
        values, recommended = self.to_dict() | named | {"features": self.features or entry.features}, entry.spectral
        if self.model in pretrained.NAMES:
            values["tune"] = self.tune or "last-stage"
            recommended = models.spectral_of_head(self.model, self.head)
        elif changed := [name for name in _PRETRAINED if getattr(self, name) != _PRETRAINED[name]]:
            listed = ", ".join(pretrained.NAMES)
            raise SettingsError(f"{', '.join(changed)}: only for a pretrained model ({listed}), not for {self.model}")
        if values["features"] is not None:
            for name, value in features.extractor_entry(values["features"]).settings.items():
                values[name] = value if values[name] is None else values[name]
            if self.feature_channels and self.model == "scatter-cnn":
                raise SettingsError(
                    "scatter-cnn takes its form from the number of channels, which feature_channels changes: use the "
                    "model cnn, the form for colour images, or cnn-small, that for grey ones"
                )
            values["feature_norm"] = values["feature_norm"] or "none"
            values["feature_length"] = values["feature_length"] or ("unit" if values["feature_rank"] else "none")
        elif entry.reads == "features":
            listed = ", ".join(features.extractor_names())
            raise SettingsError(f"the model {self.model} reads features: say which with features, one of {listed}")
        elif self.feature_gains == "private":
            raise SettingsError(f"feature_gains private: the model {self.model} reads images, so leave it out")
        undecided = all(
            values[name] in (None, {}, []) for name in (*_OPEN, "layer_ratios", "dense_layers", "feature_ratio")
        )
        if self.method == "spectral" and undecided:
            values |= recommended  # together or not at all: they were measured together
        values |= {name: 0 for name in _OPEN if values[name] is None}
        if self.is_private and self.epsilon is None and self.noise_multiplier is None:
            values["epsilon"] = 2.0
        if self.method in ONE_SHOT:
            values |= {"epochs": 1, "evaluate_every": 1}
        return ResolvedSettings(**values)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings(_CheckedOptions):
    """A training run as it is made: a private one has an epsilon or a noise multiplier, and every ratio is a number."""

    block_size: int
    conv_ratio: float
    linear_ratio: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_private and self.epsilon is None and self.noise_multiplier is None:
            raise SettingsError(f"method {self.method} needs an epsilon or a noise_multiplier")

    def sampling(self, records: int) -> tuple[float, int]:
        """Returns the sample rate and the number of steps of a run on so many records.

        Raises:
            SettingsError: If a batch would have more records than there are.
        """
        if self.batch_size > records:
            raise SettingsError(f"batch_size {self.batch_size} exceeds the {records} training samples: lower it")
        return self.batch_size / records, self.epochs * math.ceil(records / self.batch_size)

    def essential(self) -> dict[str, Any]:
        """Returns the settings that decide what is computed, not where and how fast, as plain values."""
        return self.to_dict(without=_FREE)


_OPEN = ("block_size", "conv_ratio", "linear_ratio")

#: Settings of pretrained models, and what they are for others.
_PRETRAINED = {"weights": None, "tune": None, "head": "linear", "lora_rank": 8, "text_length": 256}

#: Groups and names of settings that only a method which takes steps has a use for.
_STEPS_ONLY = ("Spectral-DP", "Training", "max_grad_norm", "clipping", "layer_max_grad_norms", "noise_allocation")
_FREE = {f.name for f in fields(Settings) if f.metadata["free"]}
