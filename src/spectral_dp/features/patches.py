"""Responses to a dictionary of patches of *generated* images: features that need no data at all.

    q       = ((p - mean) / sqrt(variance + floor) - m) W d      for every patch p of an image, and every atom d
    plus_c  = mean over the patches of cell c of relu(q - t)
    minus_c = mean over the patches of cell c of relu(-q - t)

averaged over the image and its mirror image, unless left and right mean something. The cells are a square grid over the
image.

The mirror image is free, because the dictionary is closed under mirroring: the response of a mirrored patch to ``d`` is
that of the patch to the mirrored ``d``, and both responses are ``S ± A`` of two products of half the length (see
``priors/patches.py``). Whitening and atoms are one matrix. Responses are computed for one cell of one image at a time,
so that they never leave the processor's cache, and of both signs only sums are kept:
``relu(q - t) = max(q, t) - t`` and ``relu(-q - t) = -min(q, -t) - t``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extractor import FixedExtractor, Shape
from spectral_dp.features.registry import ImageFacts, register_extractor
from spectral_dp.priors import ImagePrior, get_prior, prior_assumption
from spectral_dp.priors.dictionary import learn_dictionary, shrunk
from spectral_dp.priors.patches import normalised_patches

_RESPONSES_AT_ONCE = 1 << 16  # of a few numbers each, so that they stay in a cache of 1 MB


@dataclass(frozen=True)
class DictionarySettings:
    """Settings of one dictionary of patches.

    Attributes:
        size: Side of a patch.
        atoms: Number of atoms. With their mirror images there are twice as many.
        shrink: By how much images are made smaller before patches are taken, by averages over squares.
    """

    size: int = 6
    atoms: int = 1000
    shrink: int = 1

    def __post_init__(self) -> None:
        if self.size < 2 or self.atoms < 1 or self.shrink < 1:
            raise FeatureError(
                f"a dictionary needs patches of at least 2 x 2, an atom, and shrink=1 or more, got {self}"
            )


@dataclass(frozen=True)
class Patches(FixedExtractor):
    """Pooled responses to patches of generated images, as an :class:`~spectral_dp.features.Extractor`.

    The features ``(F, cells, cells)`` are those of one dictionary after the other. Of each, first come the responses
    above the threshold by atom, then those below its negative. They are averages of numbers of order one, and below
    a thousand for every image, so half precision holds them.

    Formal guarantee. The dictionaries are learnt from generated images, so the function is fixed, its settings are
    public, and features cost no privacy budget. See :class:`~spectral_dp.features.Extractor`.

    Attributes:
        dictionaries: Settings of the dictionaries.
        prior: The prior of the generated images, or its name.
        cells: Number of cells along each side of the grid over which responses are averaged.
        threshold: Responses of smaller size count as zero.
        seed: Seed of the generated images.
        mirrored: Whether responses are averaged over the image and its mirror image. Where left and right mean
            something, as in written characters, choose False: responses to mirrored atoms are then features of their
            own, so there are twice as many.

    >>> Patches().output_shape((3, 32, 32))
    (2000, 3, 3)
    """

    name = "patches"

    dictionaries: tuple[DictionarySettings, ...] = (DictionarySettings(),)
    prior: str | ImagePrior = "dead-leaves"
    cells: int = 3
    threshold: float = 0.5
    seed: int = 0
    mirrored: bool = True

    def __post_init__(self) -> None:
        get_prior(self.prior)
        if not isinstance(self.mirrored, bool):
            raise FeatureError(f"mirrored must be true or false, got {self.mirrored!r}")
        if not self.dictionaries or self.cells < 1 or not 0 <= self.threshold < float("inf"):
            raise FeatureError(
                "patches need a dictionary, a cell and a threshold that is not negative, got "
                f"dictionaries={self.dictionaries}, cells={self.cells}, threshold={self.threshold}"
            )

    @classmethod
    def for_images(cls, shape: Shape) -> Patches:
        """Returns settings to begin with: small grey patches for images of one channel, and coloured ones else."""
        if shape[0] == 1:
            return cls((DictionarySettings(size=5, atoms=500),), prior="grey-leaves", cells=4)
        return cls()

    @property
    def assumption(self) -> str:
        """What a privacy statement says of where the features come from."""
        return f"responses to patches of generated images; {prior_assumption(self.prior)}"

    @property
    def is_public(self) -> bool:
        """Whether the features depend on no private record but the one they are of."""
        return get_prior(self.prior).is_public

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings, those of the prior, and the version of the computation."""
        return {
            "dictionaries": [asdict(each) for each in self.dictionaries],
            "prior": dict(get_prior(self.prior).settings),
            "cells": self.cells,
            "threshold": self.threshold,
            "seed": self.seed,
            "version": self.version,
            **({} if self.mirrored else {"mirrored": False}),  # so caches from before there was a choice stay valid
        }

    def output_shape(self, input_shape: Shape) -> Shape:
        """Returns ``(F, cells, cells)``: a feature for each atom and sign, and for mirrored atoms if not averaged."""
        if len(input_shape) != 3:
            raise FeatureError(f"expected images (C, H, W), got shape {input_shape}")
        for each in self.dictionaries:
            height, width = input_shape[1:]
            if height % each.shrink or width % each.shrink:
                raise FeatureError(
                    f"images of {height} x {width} cannot be shrunk by {each.shrink}: give a divisor of both sides"
                )
            positions = min(height, width) // each.shrink - each.size + 1
            if positions < self.cells:
                raise FeatureError(
                    f"images of {height} x {width}, shrunk by {each.shrink}, have {max(positions, 0)} positions of "
                    f"patches of size {each.size} along a side, but there are {self.cells} cells: use fewer cells, "
                    "smaller patches or larger images"
                )
        atoms = sum(each.atoms for each in self.dictionaries)
        return (2 if self.mirrored else 4) * atoms, self.cells, self.cells

    def _module(self, input_shape: Shape) -> nn.Module:
        return PatchResponses(self, input_shape)


class PatchResponses(nn.Module):
    """Pooled responses to patches: ``(B, C, H, W) -> (B, F, cells, cells)``.

    It has no parameters and passes no gradients on, and its dictionaries are no part of its ``state_dict``: they follow
    from the settings. Images are bytes from 0 to 255, or floating-point numbers from 0 to 1.
    """

    def __init__(self, patches: Patches, shape: Shape) -> None:
        super().__init__()
        self.patches, self.shape = patches, tuple(shape)
        for number, each in enumerate(patches.dictionaries):
            learnt = learn_dictionary(get_prior(patches.prior), self.shape, seed=patches.seed, **asdict(each))
            # The offset is one more even coordinate, which is 1 for every patch.
            even = torch.cat([learnt.even_map, -learnt.offset[None]])
            self.register_buffer(f"even_{number}", even.contiguous(), persistent=False)
            self.register_buffer(f"odd_{number}", learnt.odd_map.contiguous(), persistent=False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Returns the features of images."""
        if tuple(images.shape[1:]) != self.shape:
            raise FeatureError(f"expected images of shape (B, {', '.join(map(str, self.shape))}), got {images.shape}")
        features = self.get_buffer("even_0").new_empty(len(images), *self.patches.output_shape(self.shape))
        for image, row in zip(images, features, strict=True):  # to the last bit, no image depends on another
            row.copy_(self._features(image))
        return features

    def _features(self, image: Tensor) -> Tensor:
        pixels = (image.float() / 255 if image.dtype == torch.uint8 else image.float())[None]
        found = []
        for number, each in enumerate(self.patches.dictionaries):
            even, odd = normalised_patches(shrunk(pixels, each.shrink), each.size)
            even, odd = torch.cat([even, torch.ones_like(even[:1])]).squeeze(1), odd.squeeze(1)
            maps = self.get_buffer(f"even_{number}"), self.get_buffer(f"odd_{number}")
            found.append(_pooled(even, odd, *maps, self.patches))
        return torch.cat(found)


def _pooled(even: Tensor, odd: Tensor, even_map: Tensor, odd_map: Tensor, patches: Patches) -> Tensor:
    """Returns the mean responses of each cell, by sign: ``(E, H', W'), (O, H', W') -> (F, cells, cells)``."""
    cells, t = patches.cells, patches.threshold
    rows, columns = (_bounds(size, cells) for size in even.shape[1:])
    sums = even.new_zeros(1 if patches.mirrored else 2, cells, cells, 2, even_map.shape[1])
    for r, (top, bottom) in enumerate(rows):
        for c, (left, right) in enumerate(columns):
            e, o = (x[:, top:bottom, left:right].flatten(1).T for x in (even, odd))
            # Of the mirror image, an atom's responses are those of the mirrored atom, in the cell across.
            there = sums[0, r, cells - 1 - c] if patches.mirrored else sums[1, r, c]
            _add_responses(e, o, even_map, odd_map, t, sums[0, r, c], there)
    down, across = (even.new_tensor([b - a for a, b in bounds]) for bounds in (rows, columns))
    views = 2 if patches.mirrored else 1
    mean = sums.flatten(3) / (views * down[:, None, None] * across[:, None])
    return mean.sub_(t).clamp_(min=0).permute(0, 3, 1, 2).flatten(0, 1)


def _add_responses(
    e: Tensor, o: Tensor, even_map: Tensor, odd_map: Tensor, t: float, here: Tensor, mirrored: Tensor
) -> None:
    """Adds ``max(q, t)`` and ``max(-q, t)`` of some patches, ``(2, n)``: of atoms here, of mirrored ones there."""
    block = max(1, _RESPONSES_AT_ONCE // len(e))
    for start in range(0, even_map.shape[1], block):
        some = slice(start, start + block)
        S, A = e @ even_map[:, some], o @ odd_map[:, some]
        for sums, q in ((here, S + A), (mirrored, S.sub_(A))):
            sums[0, some] += q.clamp(min=t).sum(0)
            sums[1, some] -= q.clamp_(max=-t).sum(0)


def _bounds(size: int, cells: int) -> list[tuple[int, int]]:
    """Returns where each cell begins and ends, as in torch's adaptive pooling.

    That is symmetric, which the mirror image needs. Where cells do not divide the size, neighbours share a row.
    """
    return [(size * i // cells, -(-size * (i + 1) // cells)) for i in range(cells)]


def patches_of(
    images: ImageFacts,
    *,
    patch: int | str | None = None,
    atoms: int | None = None,
    cells: int | None = None,
    threshold: float | None = None,
    prior: str | None = None,
    mirrored: bool = True,
) -> Patches:
    """Returns the patches for some images; what is not given is as :meth:`Patches.for_images` has it.

    Args:
        images: Public facts of the images.
        patch: Side of a patch. Several dictionaries are written with plus signs, and patches of images that are made
            smaller with the factor: ``"6+8+6/2"`` has patches of 6 and of 8, and of 6 in images of half the size.
        atoms: Number of atoms of each dictionary.
        cells: Number of cells along each side of the grid.
        threshold: Responses of smaller size count as zero.
        prior: The prior of the generated images.
        mirrored: Whether features are averaged over the mirror image; not for written characters.
    """
    usual = Patches.for_images(images.shape)
    (first,) = usual.dictionaries
    dictionaries = tuple(
        _dictionary(str(part), first.atoms if atoms is None else atoms)
        for part in str(first.size if patch is None else patch).split("+")
    )
    return Patches(
        dictionaries,
        usual.prior if prior is None else prior,
        usual.cells if cells is None else cells,
        usual.threshold if threshold is None else threshold,
        mirrored=mirrored,
    )


def _dictionary(text: str, atoms: int) -> DictionarySettings:
    size, _, shrink = text.partition("/")
    try:
        return DictionarySettings(int(size), atoms, int(shrink or 1))
    except ValueError as error:
        raise FeatureError(
            f"patch {text!r} is no size of patches: write 6, 6/2, or several as 6+8 ({error})"
        ) from error


register_extractor(
    "patches",
    patches_of,
    assumption="responses to patches of generated images, for which no record was read",
    settings={"feature_norm": "group", "feature_groups": 40},
)
