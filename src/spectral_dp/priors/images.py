"""Generated images as bytes, by the name of a prior and a seed."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

import torch
from torch import Tensor

from spectral_dp.import_paths import imported_factory
from spectral_dp.priors.generator import ImagePrior, Shape
from spectral_dp.priors.leaves import DeadLeaves
from spectral_dp.priors.noise_fields import OneOverF, WhiteNoise
from spectral_dp.priors.strokes import PenStrokes

#: The priors by name.
PRIORS = MappingProxyType(
    {
        "dead-leaves": DeadLeaves(),
        "grey-leaves": DeadLeaves(leaves=33, largest=0.5, grey=True),
        "strokes": PenStrokes(),
        "one-over-f": OneOverF(),
        "white-noise": WhiteNoise(),
    }
)

#: Images that are drawn at a time. It decides what a seed gives, so it is no setting. They fit into a cache of 2 MB.
BATCH = 64


def get_prior(prior: str | ImagePrior) -> ImagePrior:
    """Returns the prior of this name: one of :data:`PRIORS`, or your own as ``package.module:factory``.

    If the argument is a prior already, it is returned unchanged.
    """
    if isinstance(prior, ImagePrior):
        return prior
    if prior in PRIORS:
        return PRIORS[prior]
    if ":" not in prior:
        listed = ", ".join(map(repr, PRIORS))
        raise ValueError(f"unknown prior {prior!r}: choose one of {listed}, or give your own as package.module:factory")
    made = imported_factory(prior, "prior")()
    if not isinstance(made, ImagePrior):
        raise TypeError(f"{prior} makes a {type(made).__name__}, which is no ImagePrior: derive its class from it")
    return made


def prior_assumption(prior: str | ImagePrior) -> str:
    """Returns what a privacy statement says of where the images of a prior come from."""
    law = get_prior(prior)
    return "no record was read for them" if type(law) in map(type, PRIORS.values()) else law.assumption


def image_batches(prior: str | ImagePrior, shape: Shape, seed: int = 0) -> Iterator[Tensor]:
    """Yields generated images without end, as bytes ``(64, C, H, W)``.

    Args:
        prior: The prior, or its name.
        shape: Shape ``(C, H, W)`` of an image.
        seed: Seed of the images. Equal seeds give equal images, on every run.
    """
    prior = get_prior(prior)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"generated images have a shape (C, H, W) of positive sizes, got {tuple(shape)}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        with torch.inference_mode(False), torch.no_grad():
            images = prior.draw(BATCH, tuple(shape), generator).mul(255).round_().to(torch.uint8)
        yield images  # not within: the caller would go on without gradients


def generate_images(prior: str | ImagePrior, count: int, shape: Shape, *, seed: int = 0) -> Tensor:
    """Returns the first images of a seed, as bytes from 0 to 255: ``(count, C, H, W)``.

    Formal guarantee. No private record is read, so nothing is released and nothing is to be charged.

    Args:
        prior: The prior, or its name: one of :data:`PRIORS`.
        count: Number of images.
        shape: Shape ``(C, H, W)`` of an image.
        seed: Seed of the images. Fewer images of a seed are the first of more.

    >>> generate_images("dead-leaves", 2, (3, 32, 32)).shape
    torch.Size([2, 3, 32, 32])
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    images = torch.empty(count, *shape, dtype=torch.uint8)
    for start, batch in zip(range(0, count, BATCH), image_batches(prior, shape, seed), strict=False):
        images[start : start + BATCH] = batch[: count - start]
    return images
