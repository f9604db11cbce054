"""Everything that a training run can be told, in one place: flags, configuration files and run directories all use it.

A field's type, default and help text are all that the command line needs to offer it as a flag.
"""
# ruff: noqa: RUF009 - _option makes a dataclass field

from __future__ import annotations

import copy
import math
import typing
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from typing import Any, Literal, Self

from spectral_dp.experiments.setting_files import refuse_old_names
from spectral_dp.experiments.setting_types import SettingsError, checked_setting
from spectral_dp.relations import Relation

MethodName = Literal["spectral", "dpsgd", "opacus", "class-means", "least-squares", "nonprivate"]


def _option(default: Any, help: str, *, group: str, free: bool = False) -> Any:
    """A setting; a *free* one does not change what is computed, so a resumed run may have another value."""
    metadata = {"help": help, "group": group, "free": free}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


_GROUPS = ("Data", "Model", "Privacy", "Spectral-DP", "Training", "Execution")
_data, _model, _privacy, _spectral, _training, _execution = (partial(_option, group=group) for group in _GROUPS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a training run, each of its type."""

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
    feature_options: dict[str, bool | int | float | str] = _data(
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
    feature_exponent: float = _data(
        1.0, "Every feature x becomes sign(x) |x|^exponent before it is normalised: 0.5 takes square roots."
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
    feature_gains: Literal["generated", "private"] = _data(
        "generated",
        "Whose mean and variance along the axes make these gains, with --feature-rank: those of generated images, or "
        "those of the records, which are released with noise and are part of the budget.",
    )
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
        20.0,
        "Noise multiplier of the private statistics, which are part of the budget, with --feature-norm private or "
        "--feature-gains private.",
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
    weight_standardization: bool = _model(
        False, "Standardise the weights of each output channel of inner convolutions, in model2 and model3."
    )
    block_size: int | None = _model(
        None, "Block size of block-circulant dense layers; 0 for dense ones (default: the model's)."
    )
    dense_layers: list[str] = _model([], "Name of a layer to leave dense, with --block-size. May be repeated.")
    last_block_size: int = _model(10, "Block size of the last dense layer, with --block-size.")
    zero_last_layer: bool = _model(False, "Let the weights of the last dense layer begin at zero, not at random.")
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
    ema_candidates: list[float] = _training(
        [],
        "Another decay to compare with --ema-decay, 0 for the last weights, on records that --validation-size leaves "
        "out. May be repeated.",
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
