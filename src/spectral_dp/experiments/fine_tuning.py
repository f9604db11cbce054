"""From the settings of a run to a pretrained network of which a part is trained, what it reads, and what is assumed."""

from __future__ import annotations

from typing import Any

from torch import nn

from spectral_dp import models, pretrained
from spectral_dp.data import ImageDataset, TextDataset
from spectral_dp.experiments.settings import ONE_SHOT, ResolvedSettings, SettingsError
from spectral_dp.pretrained.inputs import NetworkImages, NetworkTexts, network_images, network_texts

_PARTS = {
    "head": "its head",
    "last-block": "its last block and its head",
    "last-stage": "its last stage and its head",
    "biases": "its biases and its head",
    "lora": "additions of low rank to its attention, and its head",
    "all": "all of it",
}


def is_fine_tuned(settings: ResolvedSettings) -> bool:
    """Returns whether the model of a run is a pretrained network, of which a part is trained."""
    return settings.tune is not None


def check_fine_tuning(settings: ResolvedSettings) -> None:
    """Raises ``SettingsError`` for what a pretrained model cannot be asked for, before anything is read."""
    if settings.tune is None:
        return
    model, architecture = settings.model, pretrained.find_architecture(settings.model)
    if settings.features is not None:
        raise SettingsError(
            f"{model} as the model is fine-tuned and reads records themselves: leave out features "
            f"{settings.features}, or train a head on cached ones with model linear and features {model}"
        )
    if settings.method in (*ONE_SHOT, "opacus"):
        raise SettingsError(
            f"method {settings.method} does not fine-tune {model}: use spectral or dpsgd, or model linear with "
            f"features {model}"
        )
    if settings.tune == "lora" and not architecture.low_rank:
        able = ", ".join(other.name for other in pretrained.ARCHITECTURES if other.low_rank)
        raise SettingsError(f"tune lora adds to attention, which {model} does not have: use it with {able}")
    if settings.head == "linear" and (settings.block_size or settings.dense_layers):
        raise SettingsError(
            "block_size and dense_layers are for the dense layers of a head: give head transfer1, transfer2 or "
            "transfer3 with them, not linear"
        )
    if architecture.reads == "text":
        of_images = {"flip": False, "shift": 0, "augmentation_multiplicity": 1, "image_size": None}
        if asked := [name for name, none in of_images.items() if getattr(settings, name) != none]:
            raise SettingsError(
                f"{model} reads texts, which cannot be augmented or resized: leave out {', '.join(asked)}"
            )


def weights_of(settings: ResolvedSettings) -> pretrained.PretrainedWeights:
    """Returns the weights that a run begins with."""
    path = settings.weights
    return pretrained.find_weights(settings.model, None if path in (None, "default") else path)


def network_data(settings: ResolvedSettings, records: ImageDataset | TextDataset) -> NetworkImages | NetworkTexts:
    """Returns the records of a run as its pretrained network reads them.

    Raises:
        SettingsError: The network reads texts and these are images, or the other way round.
    """
    architecture = pretrained.find_architecture(settings.model)
    if isinstance(records, TextDataset) != (architecture.reads == "text"):
        others = [other.name for other in pretrained.ARCHITECTURES if other.reads != architecture.reads]
        kind = "texts" if isinstance(records, TextDataset) else "images"
        raise SettingsError(
            f"{settings.dataset} has {kind}, which {settings.model} does not read: use {', '.join(others)}"
        )
    weights = weights_of(settings)
    if isinstance(records, ImageDataset):
        return network_images(records, weights, side_of(settings))
    return network_texts(records, weights, settings.text_length)


def side_of(settings: ResolvedSettings) -> int:
    """Returns the pixels a side of the images that the network of a run reads."""
    return settings.image_size or pretrained.find_architecture(settings.model).image_size


def audited_shape(settings: ResolvedSettings) -> tuple[int, int, int]:
    """Returns the shape of the images with which the training step of a run is audited.

    Raises:
        SettingsError: The network reads texts: the audit moves the inputs by small numbers, and word pieces have none.
    """
    check_fine_tuning(settings)
    if pretrained.find_architecture(settings.model).reads == "text":
        raise SettingsError(
            f"{settings.model} reads texts, and the audit needs inputs that are numbers: audit the head on its "
            f"features, with model linear and features {settings.model}"
        )
    return 3, side_of(settings), side_of(settings)


def tuned_network(settings: ResolvedSettings, classes: int) -> nn.Module:
    """Returns the pretrained network of a run with a fresh head, in which only what is to be trained is trainable."""
    architecture, weights = pretrained.find_architecture(settings.model), weights_of(settings)
    network = weights.network(classes)
    _set_head(settings, network, architecture, classes)
    assert settings.tune is not None
    return pretrained.train_only(network, architecture, settings.tune, rank=settings.lora_rank)


def fine_tuning_facts(settings: ResolvedSettings) -> dict[str, Any]:
    """Returns what the privacy statement says of the pretrained network of a run; nothing if it has none."""
    if settings.tune is None:
        return {}
    return {
        "pretrained": weights_of(settings).assumption,
        "trained": f"{_PARTS[settings.tune]}; everything else stays as it was published",
    }


def _set_head(
    settings: ResolvedSettings, network: nn.Module, architecture: pretrained.Architecture, classes: int
) -> None:
    """Puts a head of the paper's in the place of the linear one, or lets that begin at zero."""
    name = architecture.head.removesuffix(".")
    if settings.head == "linear":
        for parameter in network.get_submodule(name).parameters():
            nn.init.zeros_(parameter)
        return
    head = models.build(
        settings.head,
        input_shape=(int(network.width),),  # type: ignore[arg-type]
        classes=classes,
        activation=settings.activation,
        block_size=settings.block_size or None,
        last_block_size=settings.last_block_size,
        dense_layers=[layer.removeprefix(architecture.head) for layer in settings.dense_layers],
    )
    network.register_module(name, head)
