"""The spectrum of features under generated images: computed once for each front end, and kept on the disk.

A spectrum is a file with the mean, the eigenvectors and the eigenvalues of the covariance, or of the correlations, and
a description of what it is of (front end, stages, generator) with a checksum. It is written as a whole, and verified
when it is read; one that is damaged, or of something else, is computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from spectral_dp.features.cache import FeatureCache, system_errors
from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extraction import ExtractionProgress
from spectral_dp.features.extractor import Extractor, Shape
from spectral_dp.features.pipeline import extract_in_stages, shape_after
from spectral_dp.features.views import VIEWS
from spectral_dp.files import locked, whole_file
from spectral_dp.priors import ImagePrior, Spectrum, generate_images, get_prior, principal_axes

_VERSION = 1
_KEPT = 4096  # eigenvectors that are stored, if there are so many: more cost room, fewer another computation
_ROWS_AT_ONCE = 1024
_LEAST_DEVIATION = 1e-3  # of the largest: a number that hardly varies is not blown up
_TENSORS = ("mean", "basis", "eigenvalues")
_UNREADABLE = (OSError, RuntimeError, ValueError, EOFError, UnpicklingError)  # what torch says of damaged files


@dataclass(frozen=True)
class StoredSpectrum:
    """A spectrum on the disk.

    Attributes:
        path: The file.
        checksum: The checksum of its contents.
        size: How many numbers an eigenvector has: those of a record, or its channels.
        rank: How many eigenvectors there are.
        channels: Whether it is a spectrum of channels, over all positions.
    """

    path: Path
    checksum: str
    size: int
    rank: int
    channels: bool

    def load(self, rank: int | None = None) -> Spectrum:
        """Returns the spectrum with its first ``rank`` directions, or with all. Standardised ones are not orthonormal.

        Raises:
            FeatureError: If the file is gone, or was replaced.
        """
        try:
            found = _read(self.path)
        except _UNREADABLE as error:
            raise FeatureError(f"cannot read the spectrum {self.path} ({error}): begin again") from error
        if found["checksum"] != self.checksum:
            raise FeatureError(f"{self.path} is another spectrum now: begin again, it is computed if needed")
        kept = self.rank if rank is None else rank
        return Spectrum(found["mean"], found["basis"][:kept].T, found["eigenvalues"][:kept])


def generated_spectrum(
    extractor: Extractor,
    input_shape: Shape,
    root: str | os.PathLike[str],
    *,
    stages: Sequence[Extractor] = (),
    mirrored: bool = False,
    channels: bool = False,
    standardized: bool = False,
    rank: int | None = None,
    prior: str | ImagePrior = "dead-leaves",
    images: int = 8000,
    seed: int = 0,
    jobs: int = 1,
    show: Callable[[ExtractionProgress], None] = lambda _: None,
) -> StoredSpectrum:
    """Returns the spectrum that features have under generated images, computed where it is not on the disk yet.

    Formal guarantee. No private record is read, so nothing is released and nothing is to be charged.

    Args:
        extractor: The front end.
        input_shape: Shape ``(C, H, W)`` of an image.
        root: The directory of all cached features. The spectrum lies in ``root/spectra``.
        stages: What is done to the features before they are projected.
        mirrored: Whether the first stage averages over the image and its mirror image.
        channels: Whether to take the covariance of channels, over all positions of maps, not of whole records.
        standardized: Whether to take correlations in place of covariances: every number is divided by the deviation
            that it has under generated images. Without it, axes of numbers that are small everywhere come last. The
            directions of the result are not orthonormal then, because this division is part of them.
        rank: The least number of eigenvectors that are needed.
        prior: What draws the images, or its name (see ``spectral_dp.priors``).
        images: How many images to generate.
        seed: Seed of the images.
        jobs: The number of processes that compute features.
        show: Called with how far the computation of features is.

    Raises:
        FeatureError: If the features have not so many directions, or the disk is full.
    """
    law, views = get_prior(prior), VIEWS if mirrored else VIEWS[:1]
    shape = shape_after(extractor, stages, input_shape, len(views))
    if channels and len(shape) != 3:
        raise FeatureError(
            f"a spectrum of channels is one of maps (C, H, W), got features of shape {shape}: leave feature_channels "
            "out, or feature_ratio"
        )
    size = shape[0] if channels else math.prod(shape)
    samples = images * math.prod(shape[1:]) if channels else images
    available = min(size, samples - 1)
    if (rank or 1) > available:
        raise FeatureError(
            f"{images} generated images with {size} numbers each give at most {available} directions, not {rank}: "
            "lower the rank (feature_rank, feature_channels), or generate more images (feature_prior_images)"
        )
    kept = min(available, max(_KEPT, rank or 1))
    description = {
        "version": _VERSION,
        "extractor": [extractor.name, dict(extractor.settings)],
        "stages": [[stage.name, dict(stage.settings)] for stage in stages],
        "mirrored": mirrored,
        "channels": channels,
        "prior": dict(law.settings),
        "images": images,
        "seed": seed,
        "input_shape": list(input_shape),
        "kept": kept,
    }
    if standardized:  # not named otherwise, so that spectra from before there was a choice are still found
        description["standardized"] = True
    named = json.dumps(description, sort_keys=True)
    digest = hashlib.sha256(named.encode()).hexdigest()
    path = Path(root) / "spectra" / f"{extractor.name}-{law.kind}-{digest[:12]}.pt"
    with _alone(path):
        if (found := _verified(path, named, channels)) is not None:
            return found
        pixels, title = generate_images(law, images, input_shape, seed=seed), f"{law.kind}-{images}"
        rows = extract_in_stages(pixels, extractor, stages, root, title=title, views=views, jobs=jobs, show=show)
        deviations = _deviations(rows, channels) if standardized else torch.ones(size)
        vectors = (part / deviations for part in _vectors(rows, channels))
        axes = principal_axes(vectors, count=samples, rank=kept)
        _write(path, _in_units_of(axes, deviations), named)
        stored = _verified(path, named, channels)
    if stored is None:
        raise FeatureError(f"{path} cannot be read back after it was written: check the disk")
    return stored


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lets one process at a time look for this spectrum, and compute it."""
    with system_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock"), wait=True):
            yield


def _vectors(rows: FeatureCache, channels: bool) -> Iterator[Tensor]:
    """Yields the vectors of some records each: all numbers of a record, or the channels of every position."""
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE].float()
        yield part.flatten(2).transpose(1, 2).flatten(0, 1) if channels else part.flatten(1)


def _deviations(rows: FeatureCache, channels: bool) -> Tensor:
    """Returns the standard deviation of every number over all vectors; one that never varies counts as varying little.

    The variance is taken around the first part's mean, near to the true one, so that little cancels.
    """
    origin, total, squares, count = torch.zeros(()), torch.zeros(()).double(), torch.zeros(()).double(), 0
    for part in _vectors(rows, channels):
        origin = origin if count else part.mean(0)
        centred = (part - origin).double()
        total, squares, count = total + centred.sum(0), squares + centred.square().sum(0), count + len(part)
    deviations = (squares / count - (total / count).square()).clamp(min=0).sqrt()
    return deviations.clamp(min=max(_LEAST_DEVIATION * float(deviations.max()), 1e-30)).float()


def _in_units_of(spectrum: Spectrum, deviations: Tensor) -> Spectrum:
    """Returns the spectrum of standardised vectors as one that reads vectors as they are: ``u^t (x / s - m)``."""
    return Spectrum(spectrum.mean * deviations, spectrum.basis / deviations[:, None], spectrum.eigenvalues)


def _write(path: Path, spectrum: Spectrum, description: str) -> None:
    tensors = {
        "mean": spectrum.mean.contiguous(),
        "basis": spectrum.basis.T.contiguous(),  # one eigenvector after the other, so that the first can be read alone
        "eigenvalues": spectrum.eigenvalues.contiguous(),
    }
    with system_errors(path), whole_file(path) as file:
        torch.save({**tensors, "description": description, "checksum": _checksum(tensors)}, file)


def _read(path: Path) -> dict[str, Any]:
    """Returns what is in a file: mapped, so that only what is used of it is read, and nothing but tensors and texts."""
    found = torch.load(path, mmap=True, weights_only=True)
    if not isinstance(found, dict) or not all(isinstance(found.get(name), Tensor) for name in _TENSORS):
        raise ValueError("it is no spectrum")
    if not all(isinstance(found.get(name), str) for name in ("description", "checksum")):
        raise ValueError("it does not say what it is of")
    return found


def _verified(path: Path, description: str, channels: bool) -> StoredSpectrum | None:
    """Returns the spectrum in a file if it is whole, unchanged and of this description."""
    try:
        found = _read(path)
    except _UNREADABLE:
        return None
    checksum = _checksum(found)
    if found["description"] != description or found["checksum"] != checksum:
        return None
    return StoredSpectrum(path, checksum, len(found["mean"]), len(found["eigenvalues"]), channels)


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in _TENSORS:
        digest.update(f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}\n".encode())
        digest.update(tensors[name].numpy().data)
    return digest.hexdigest()
