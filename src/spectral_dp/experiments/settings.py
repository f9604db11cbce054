"""Everything that a training run can be told, in one place: flags, configuration files and run directories all use it.

A field's type, default and help text are all that the command line needs to offer it as a flag. :class:`Settings` are
what a user asked for; :class:`ResolvedSettings` are what is run, and nothing about them is left open. The command that
reads settings resolves them, once.
"""
# ruff: noqa: RUF009 - _option makes a dataclass field

from __future__ import annotations

import copy
import math
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, Literal, Self

from spectral_dp.experiments.setting_files import refuse_old_names
from spectral_dp.experiments.setting_types import SettingsError as SettingsError  # what most modules raise of it
from spectral_dp.experiments.setting_types import checked_setting
from spectral_dp.relations import Relation

MethodName = Literal["spectral", "dpsgd", "opacus", "class-means", "least-squares", "nonprivate"]

#: Methods that make a linear head in a single release of cached features, without steps.
ONE_SHOT = ("class-means", "least-squares")

#: Settings that say where records of the user's own are, and what the data set is called then.
_OWN_DATA = {"image_folder": "image-folder", "csv": "csv"}


def _option(default: Any, help: str, *, group: str, free: bool = False) -> Any:
    """A setting; a *free* one does not change what is computed, so a resumed run may have another value."""
    metadata = {"help": help, "group": group, "free": free}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_GROUPS = ("Data", "Model", "Privacy", "Spectral-DP", "Training", "Execution")
_data, _model, _privacy, _spectral, _training, _execution = (partial(_option, group=group) for group in _GROUPS)

_POSITIVE = (
    *("epochs", "batch_size", "augmentation_multiplicity", "evaluate_every", "max_grad_norm", "learning_rate"),
    *("train_size", "test_size", "image_size", "max_physical_batch_size", "threads", "epsilon"),
    *("feature_groups", "feature_noise_multiplier", "feature_rank", "feature_channels", "feature_damp"),
    *("feature_prior_images", "lora_rank", "feature_scale"),
)

#: Which values settings may have, and that in words; None, where a setting may be left open, always.
_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_POSITIVE, lambda value: value > 0, "positive"),
    (("momentum", "ema_decay"), lambda value: 0 <= value < 1, "in [0, 1)"),
    (
        ("shift", "weight_decay", "validation_size", "noise_multiplier", "feature_power"),
        lambda value: value >= 0,
        "at least 0",
    ),
    (("text_length",), lambda value: 2 <= value <= 512, "from 2 to 512"),
    (("head_dimensions",), lambda value: 1 <= value <= 256, "from 1 to 256"),
    (("delta", "gradient_filter_gain"), lambda value: 0 < value < 1, "between 0 and 1"),
    (("seed",), lambda value: 0 <= value < 2**31, "from 0 to 2^31 - 1"),
)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The settings of a training run, checked one by one and against each other."""

    dataset: str = _data(
        "digits",
        "Data set: digits, mnist, fashion-mnist, cifar10, cifar100, heart-survey; of texts imdb, radiology-reports.",
    )
    data_path: str | None = _data(None, "File or directory with the official files, instead of the cache.")
    image_folder: str | None = _data(
        None, "Your own images, in place of --dataset: a directory with a folder for each class, or train and test."
    )
    csv: str | None = _data(None, "Your own texts, in place of --dataset: a CSV file with a line of column names.")
    text_column: str = _data("text", "Column of the texts, with --csv.")
    label_column: str = _data("label", "Column of the labels, with --csv.")
    csv_encoding: str = _data("utf-8", "Encoding of the file, with --csv.")
    train_size: int | None = _data(None, "Train on this many samples only, a fixed random choice.")
    test_size: int | None = _data(None, "Evaluate on this many held-out samples only.")
    validation_size: int = _data(
        0, "For choosing settings: evaluate on this many training samples, left out of training, not on the test set."
    )
    image_size: int | None = _data(None, "Resize images to this many pixels a side.")
    flip: bool = _data(False, "Augment by mirroring images at random.")
    shift: int = _data(0, "Augment by shifting images by up to this many pixels.")
    augmentation_multiplicity: int = _data(
        1, "Augmented views of each sample, whose gradients are averaged before clipping."
    )

    features: str | None = _data(
        None,
        "Cached features that the model reads, not images: scattering, or your own as package.module:factory "
        "(default: the model's).",
    )
    feature_options: dict[str, int | float | str] = _data(
        {}, "Option of the features, as NAME=VALUE, such as scales=3. May be repeated."
    )
    feature_norm: Literal["group", "private", "public", "none"] | None = _data(
        None,
        "How features are normalised: by image, or by channel, with private or public statistics (default: the "
        "features').",
    )
    feature_groups: int | None = _data(
        None, "Groups of channels that are normalised by image, with --feature-norm group (default: the features')."
    )
    feature_rank: int | None = _data(
        None, "Project features on so many principal axes of those of generated images (default: no projection)."
    )
    feature_channels: int | None = _data(
        None, "Project the channels of feature maps, at every position, on so many axes; for convolutional heads."
    )
    feature_power: float = _data(
        0.5, "Gains of the axes, (eigenvalue / largest + damp)^-power, with --feature-rank or --feature-channels."
    )
    feature_damp: float = _data(1e-3, "Damp of these gains: axes with a smaller share of the largest gain no more.")
    feature_length: Literal["unit", "none"] | None = _data(
        None, "Scale the features of each record to unit length, or not (default: unit with --feature-rank)."
    )
    feature_prior: str = _data(
        "dead-leaves",
        "Generated images of the axes: dead-leaves, grey-leaves, strokes, one-over-f, white-noise; or your own as "
        "package.module:factory.",
    )
    feature_prior_images: int = _data(8000, "Number of these images.")
    feature_noise_multiplier: float = _data(
        20.0, "Noise multiplier of the private statistics, which are part of the budget, with --feature-norm private."
    )
    mirror_average: bool = _data(False, "Average features over the image and its mirror image.")

    model: str = _model(
        "model1",
        "Network: model1, lenet5, model2, model3; on features linear, cnn, cnn-small, scatter-linear, scatter-cnn, "
        "transfer1 to transfer3; pretrained those of `spectral-dp weights list`; or your own as "
        "package.module:factory.",
    )
    weights: str | None = _model(
        None, "Weights of a pretrained model: your own file, or default for those of `spectral-dp weights get`."
    )
    tune: Literal["head", "last-block", "last-stage", "biases", "lora", "all"] | None = _model(
        None, "What is trained of a pretrained model, such as resnet18 or minilm-l6 (default: last-stage)."
    )
    head: Literal["linear", "transfer1", "transfer2", "transfer3"] = _model(
        "linear", "Head of a pretrained model: linear, or the dense layers of the paper's Transfer1 to 3."
    )
    lora_rank: int = _model(8, "Rank of the additions, with --tune lora.")
    text_length: int = _model(256, "Word pieces that a pretrained model reads of a text.")
    activation: Literal["tanh", "relu"] | None = _model(None, "Activation function; tanh where the model has a choice.")
    group_norm: Literal["before", "after"] | None = _model(
        None, "Group normalisation before or after each activation of a convolution, in model2 and model3."
    )
    block_size: int | None = _model(
        None, "Block size of block-circulant dense layers; 0 for dense ones (default: the model's)."
    )
    dense_layers: list[str] = _model([], "Name of a layer to leave dense, with --block-size. May be repeated.")
    last_block_size: int = _model(10, "Block size of the last dense layer, with --block-size.")
    head_dimensions: int = _model(
        256, "Dimensions that features are projected to, if they have more, with --method least-squares."
    )

    method: MethodName = _privacy(
        "spectral",
        "What to train with; opacus is DP-SGD by Opacus itself. class-means and least-squares make a linear head of "
        "cached features in one release.",
    )
    epsilon: float | None = _privacy(
        None, "Privacy budget: calibrates the noise (default: 2, unless --noise-multiplier is given)."
    )
    delta: float = _privacy(1e-5, "The delta of the budget; keep it well below 1/N.")
    noise_multiplier: float | None = _privacy(None, "Noise multiplier, in place of --epsilon.")
    max_grad_norm: float = _privacy(1.0, "Clipping bound C of a sample's gradient.")
    clipping: Literal["flat", "per_layer", "automatic"] = _privacy(
        "flat", "Clip all layers together, each by itself (C in total), or normalise."
    )
    layer_max_grad_norms: list[float] = _privacy(
        [], "Clipping bound of one layer, with per_layer clipping, in place of --max-grad-norm. Repeat, in their order."
    )
    noise_allocation: Literal["uniform", "optimal"] = _privacy(
        "uniform", "With per_layer clipping: the same noise everywhere, or the least in total."
    )
    accountant: Literal["pld", "rdp"] = _privacy("pld", "How privacy loss is accounted for.")
    relation: Relation = _privacy(Relation.ADD_OR_REMOVE_ONE, "Which data sets are neighbours.")

    conv_ratio: float | None = _spectral(
        None, "Fraction of a convolution's coefficients to drop (default: the model's)."
    )
    linear_ratio: float | None = _spectral(
        None, "The same for block-circulant layers, and dense ones fed by an image (default: the model's)."
    )
    layer_ratios: dict[str, float] = _spectral(
        {}, "Ratio of one layer, as NAME=RATIO; wins over the others. May be repeated."
    )
    feature_ratio: float | None = _spectral(
        None, "Fraction of the cosine coefficients of every feature map to drop before training (default: the model's)."
    )
    filter: Literal["low-pass", "adaptive", "annealed"] = _spectral(
        "low-pass", "Fixed; with gains learnt from what was released; or a ratio that falls to 0 during the run."
    )
    conv_transform: Literal["fourier", "dct", "haar", "hadamard", "identity"] | None = _spectral(
        None, "Transform of convolution kernels (default: dct)."
    )
    support: Literal["kernel", "signal"] = _spectral(
        "kernel", "Spectrum of the kernel, or of the padded signal as in the paper."
    )
    order: Literal["filter_then_clip", "clip_then_filter"] = _spectral(
        "filter_then_clip", "Order of filter and clip; the paper clips first."
    )
    band: Literal["lowest", "box", "paper"] = _spectral("lowest", "Which coefficients a ratio keeps.")

    feature_scale: float = _training(
        1.0, "Multiply features by this in a linear head, so that its bias takes less of what is clipped."
    )
    epochs: int = _training(20, "Epochs.")
    batch_size: int = _training(256, "Expected batch size.")
    optimizer: Literal["sgd", "adam", "adam-bc"] = _training(
        "sgd", "Optimizer; adam-bc is Adam without the known noise in its second moment."
    )
    gradient_filter: Literal["none", "low-pass", "kalman"] = _training(
        "none", "Filter of the released gradients over time, before the optimizer."
    )
    gradient_filter_gain: float | None = _training(
        None, "Gain of this filter in (0, 1): smaller filters more (default: 0.1 for low-pass, 0.5 for kalman)."
    )
    learning_rate: float = _training(0.5, "Learning rate at the start.")
    layer_rates: dict[str, float] = _training(
        {}, "Factor on the learning rate of one layer, as NAME=FACTOR. May be repeated."
    )
    momentum: float = _training(0.0, "Momentum of SGD.")
    weight_decay: float = _training(0.0, "Weight decay.")
    schedule: Literal["constant", "cosine", "linear"] = _training(
        "constant", "How the learning rate falls over the run: not at all, or to zero."
    )
    ema_decay: float = _training(
        0.0, "Decay of an exponential moving average of the weights, which is then the result; 0 for none."
    )

    seed: int = _execution(0, "Seed of initialisation and augmentation.")
    reproducible: bool = _execution(False, "Draw noise and batches from the seed, too. The run is then NOT private.")
    max_physical_batch_size: int | None = _execution(
        None,
        "The most samples that go through the model at once; saves memory, changes nothing else (default: all, or on "
        "features what fits the processor's cache).",
        free=True,
    )
    device: str = _execution("cpu", "Torch device to train on.", free=True)
    threads: int | None = _execution(None, "Threads of torch (default: torch's).", free=True)
    evaluate_every: int = _execution(1, "Evaluate and save a checkpoint every so many epochs.")
    unsafe_diagnostics: bool = _execution(
        False, "Record figures of the raw private data (training loss, norms). NOT to be published."
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, checked_setting(f.name, self.hints()[f.name], getattr(self, f.name)))
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
        is_last = self.feature_rank or self.feature_channels or self.feature_length == "unit"
        if is_last and self.feature_norm in ("private", "public"):
            raise SettingsError(
                f"feature_norm {self.feature_norm} would act after a projection (feature_rank, feature_channels) or "
                "unit length, which are to come last: use feature_norm group or none"
            )
        for name, factor in self.layer_rates.items():
            if factor < 0:
                raise SettingsError(f"layer_rates: the factor of {name} must be at least 0, got {factor}")
        for name, ratio in ratios.items():
            if ratio is not None and not 0 <= ratio < 1:
                raise SettingsError(f"{name} must be in [0, 1): the fraction to drop, got {ratio}")

    def _check_source(self) -> None:
        own = [name for name in _OWN_DATA if getattr(self, name) is not None]
        if len(own) > 1 or (own and self.data_path is not None):
            raise SettingsError(f"give one of data_path, {', '.join(_OWN_DATA)}: each says where the records are")
        if own and self.dataset not in ("digits", _OWN_DATA[own[0]]):
            raise SettingsError(f"give dataset or {own[0]}, not both: got {self.dataset} and {getattr(self, own[0])}")
        if not own and self.dataset in _OWN_DATA.values():
            raise SettingsError(
                f"the data set {self.dataset} is your own: say where it is with {' or '.join(_OWN_DATA)}"
            )

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

    def to_dict(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Returns plain values, as for JSON, of all settings or ``without`` some of them."""
        values = asdict(self) | {"relation": str(self.relation)}
        return {name: value for name, value in values.items() if name not in without}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "the configuration") -> Self:
        """Builds settings from plain values; names that are not settings are refused."""
        known = [f.name for f in fields(cls)]
        values = {name.replace("-", "_"): value for name, value in values.items()}
        refuse_old_names(values, source)
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

        entry, own = models.entry(self.model), [name for name in _OWN_DATA if getattr(self, name) is not None]
        named = {"dataset": _OWN_DATA[own[0]]} if own else {}
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
        return self.to_dict(without=_FREE)


_OPEN = ("block_size", "conv_ratio", "linear_ratio")

#: Settings of pretrained models, and what they are for others.
_PRETRAINED = {"weights": None, "tune": None, "head": "linear", "lora_rank": 8, "text_length": 256}

#: Groups and names of settings that only a method which takes steps has a use for.
_STEPS_ONLY = ("Spectral-DP", "Training", "max_grad_norm", "clipping", "layer_max_grad_norms", "noise_allocation")
_FREE = {f.name for f in fields(Settings) if f.metadata["free"]}
