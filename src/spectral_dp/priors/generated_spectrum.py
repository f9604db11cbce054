"""The spectrum of features, or of what reaches a layer of a model, under generated images."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from spectral_dp.priors.generator import ImagePrior, Shape
from spectral_dp.priors.images import BATCH, image_batches
from spectral_dp.priors.spectrum import Spectrum, principal_axes


class HasModule(Protocol):
    """What gives a module for inputs of a shape, such as an extractor of features."""

    def module(self, input_shape: Shape) -> nn.Module:
        """Returns the module."""


Source: TypeAlias = nn.Module | HasModule


def spectrum_of(
    source: Source,
    shape: Shape,
    *,
    prior: str | ImagePrior = "dead-leaves",
    images: int = 5000,
    seed: int = 0,
    layer: str | None = None,
    rank: int | None = None,
    centred: bool = True,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> Spectrum:
    """Returns the spectrum of features, or of what reaches a layer of a model, under generated images.

    The module is used in evaluation mode, and is left as it was.

    Formal guarantee. Only generated images pass through ``source``, so its spectrum is public if ``source`` is: a fixed
    function, initial weights, or weights that were *released* by private training.

    Args:
        source: A module, or what gives one, such as an extractor.
        shape: Shape ``(C, H, W)`` of an image.
        prior: The prior of the images, or its name.
        images: How many images to generate.
        seed: Seed of the images.
        layer: Name of the layer whose *input* is meant. By default it is the output of the whole module.
        rank: See :func:`principal_axes`.
        centred: See :func:`principal_axes`.
        prepare: Makes the module's input of bytes ``(B, C, H, W)``. By default an extractor gets the bytes, and a
            module gets numbers from 0 to 1.

    >>> spectrum_of(nn.Flatten(), (1, 4, 4), images=100).basis.shape
    torch.Size([16, 16])
    """
    module = source if isinstance(source, nn.Module) else source.module(shape)
    if prepare is None:
        prepare = _from_zero_to_one if isinstance(source, nn.Module) else lambda pixels: pixels
    if layer is not None and layer not in dict(module.named_modules()):
        known = ", ".join(filter(None, dict(module.named_modules())))
        raise ValueError(f"the module has no layer named {layer!r}: it has {known}")
    vectors = _vectors(module, layer, image_batches(prior, shape, seed), images, prepare)
    first = next(vectors)
    # The layer may see several vectors of an image, such as tokens.
    count = images * len(first) // min(images, BATCH)
    return principal_axes(itertools.chain([first], vectors), count=count, rank=rank, centred=centred)


def _vectors(
    module: nn.Module,
    layer: str | None,
    batches: Iterator[Tensor],
    images: int,
    prepare: Callable[[Tensor], Tensor],
) -> Iterator[Tensor]:
    """Yields the vectors of some images each, ``(m, D)``."""
    for start in range(0, images, BATCH):
        pixels = prepare(next(batches)[: images - start])
        with torch.no_grad(), _evaluating(module), _inputs_of(module, layer) as seen:
            output = module(pixels)
        if layer is None:
            yield output.flatten(1).float()
        elif not seen:
            raise ValueError(f"the layer {layer!r} was not called for an image: name one that is")
        else:
            yield torch.cat([x.flatten(0, -2) for x in seen]).float()


@contextmanager
def _inputs_of(module: nn.Module, layer: str | None) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    if layer is None:
        yield seen
        return
    with module.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())):
        yield seen


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _from_zero_to_one(pixels: Tensor) -> Tensor:
    return pixels.float() / 255
