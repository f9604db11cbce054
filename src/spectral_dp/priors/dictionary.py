"""A dictionary of patches: unit vectors that the whitened patches of generated images cluster around.

Patches are contrast-normalised, whitened with the covariance of generated patches, and clustered by spherical k-means
that is blind to signs and to mirroring (after Coates and Ng 2012). The law of the patches is made symmetric: a patch is
as likely as its mirror image. So the whitening keeps even and odd coordinates apart (see ``patches``).

    w      = (p - m) W               a whitened patch
    score  = max |<w, ±d>|, |<w, ± mirrored d>| = |S| + |A|
    d      = the sum of its patches, turned and mirrored to where their score is, scaled to unit length
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from spectral_dp.priors.generator import ImagePrior, Shape
from spectral_dp.priors.images import BATCH, image_batches
from spectral_dp.priors.patches import from_mirror_coordinates, normalised_patches

_PER_IMAGE = 32  # patches that are taken of a generated image
_PER_ATOM = 100  # patches for each atom
_LEAST_PATCHES = 20_000
_ROUNDS = 10  # of k-means: later ones change little
_LEAST_CONTRAST = 0.1  # of the largest squared length that a normalised patch can have: less is no patch to cluster
_DAMP = 0.1  # of the mean variance, added to all variances before whitening
_ROWS = 256  # patches that are compared with all atoms at a time: their scores stay in the processor's cache


@dataclass(frozen=True, eq=False)
class PatchDictionary:
    """Whitening and atoms of patches, in mirror coordinates; the mirror images of the atoms belong to it as well.

    The response of a patch ``p`` to an atom is ``S + A`` and to its mirror image ``S - A``, with

        S = even(p) @ even_map - offset,    A = odd(p) @ odd_map.

    Attributes:
        channels: Number of channels of a patch.
        size: Side of a patch.
        mean: The mean ``m`` of patches, ``(E,)``. It is even.
        even_whitening: The whitening of even coordinates, ``(E, E)``.
        odd_whitening: The whitening of odd coordinates, ``(O, O)``.
        even_atoms: Even coordinates of the atoms, ``(n, E)``. An atom has unit length in all its coordinates.
        odd_atoms: Odd coordinates of the atoms, ``(n, O)``.
    """

    channels: int
    size: int
    mean: Tensor
    even_whitening: Tensor
    odd_whitening: Tensor
    even_atoms: Tensor
    odd_atoms: Tensor

    @property
    def even_map(self) -> Tensor:
        """Whitening and atoms in one, for even coordinates: ``(E, n)``."""
        return self.even_whitening @ self.even_atoms.T

    @property
    def odd_map(self) -> Tensor:
        """Whitening and atoms in one, for odd coordinates: ``(O, n)``."""
        return self.odd_whitening @ self.odd_atoms.T

    @property
    def offset(self) -> Tensor:
        """The response of the mean patch, ``(n,)``."""
        return self.mean @ self.even_map

    def pictures(self) -> Tensor:
        """Returns the atoms as patches, ``(n, C, s, s)``, without their mirror images."""
        return from_mirror_coordinates(self.even_atoms, self.odd_atoms, self.channels, self.size)


@lru_cache(maxsize=8)
def learn_dictionary(
    prior: ImagePrior, shape: Shape, *, size: int, atoms: int, shrink: int = 1, seed: int = 0
) -> PatchDictionary:
    """Returns the dictionary of patches of generated images.

    It is computed by one thread, whatever torch is set to, because k-means turns rounding errors into other atoms: so
    all processes of a machine find the same dictionary. It takes some seconds for a thousand atoms.

    Formal guarantee. No private record is read, so nothing is released and nothing is to be charged.

    Args:
        prior: The prior of the images.
        shape: Shape ``(C, H, W)`` of a generated image.
        size: Side of a patch.
        atoms: Number of atoms. With their mirror images there are twice as many.
        shrink: By how much images are made smaller before patches are taken, by averages over squares.
        seed: Seed of the images, and of the choice of patches.
    """
    if size < 2 or atoms < 1 or shrink < 1 or size > min(shape[1:]) // shrink:
        raise ValueError(
            f"a dictionary needs patches of at least 2 x 2 that fit into the image, and an atom, got size={size}, "
            f"atoms={atoms}, shrink={shrink} for images of shape {shape}"
        )
    with _one_thread(), torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        number = max(_PER_ATOM * atoms, _LEAST_PATCHES)
        even, odd = _sample(prior, shape, size, shrink, seed, number, generator)
        mean = even.double().mean(0)
        even_cov = torch.cov(even.T.double(), correction=0)
        odd_cov = odd.T.double() @ odd.double() / len(odd)  # around zero: mirrored patches have the opposite sign
        damp = _DAMP * (even_cov.trace() + odd_cov.trace()) / (len(even_cov) + len(odd_cov))
        whitening = _inverse_root(even_cov, damp).float(), _inverse_root(odd_cov, damp).float()
        # Patches of nearly one colour are all alike: they would take atoms that others need.
        rich = (even.square().sum(1) + odd.square().sum(1)) > _LEAST_CONTRAST * (even.shape[1] + odd.shape[1])
        if int(rich.sum()) >= atoms:
            even, odd = even[rich], odd[rich]
        even, odd = (even - mean.float()) @ whitening[0], odd @ whitening[1]
        found = _spherical_k_means(even, odd, torch.randperm(len(even), generator=generator)[:atoms])
        return PatchDictionary(shape[0], size, mean.float(), *whitening, *found)


def shrunk(images: Tensor, shrink: int) -> Tensor:
    """Returns images whose pixels are averages over squares of this side."""
    return images if shrink == 1 else F.avg_pool2d(images, shrink)


def _sample(
    prior: ImagePrior, shape: Shape, size: int, shrink: int, seed: int, number: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns patches at random positions of generated images, in mirror coordinates: ``(number, E), (number, O)``."""
    evens, odds = [], []
    for _, images in zip(range(0, number, BATCH * _PER_IMAGE), image_batches(prior, shape, seed), strict=False):
        even, odd = normalised_patches(shrunk(images.float() / 255, shrink), size)
        positions = even.shape[2] * even.shape[3]
        chosen = torch.randint(positions, (BATCH, _PER_IMAGE), generator=generator)
        chosen = (chosen + positions * torch.arange(BATCH)[:, None]).flatten()
        evens.append(even.flatten(1)[:, chosen].T)
        odds.append(odd.flatten(1)[:, chosen].T)
    return torch.cat(evens)[:number].contiguous(), torch.cat(odds)[:number].contiguous()


def _inverse_root(covariance: Tensor, damp: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return vectors @ torch.diag((values.clamp(min=0) + damp).rsqrt()) @ vectors.T


def _spherical_k_means(even: Tensor, odd: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the atoms that patches cluster around, up to signs and mirroring: ``(n, E), (n, O)``."""
    atoms = _unit(even[start], odd[start])
    for _ in range(_ROUNDS):
        sums = [1e-6 * part for part in atoms]  # an atom without patches stays where it is
        for e, o in zip(even.split(_ROWS), odd.split(_ROWS), strict=True):
            S, A = e @ atoms[0].T, o @ atoms[1].T
            best = (S.abs() + A.abs()).argmax(1, keepdim=True)
            # Turned and mirrored to where the score is, a patch has the even part sign(S) e and the odd one sign(A) o.
            sums[0].index_add_(0, best.squeeze(1), e * S.gather(1, best).sign())
            sums[1].index_add_(0, best.squeeze(1), o * A.gather(1, best).sign())
        atoms = _unit(*sums)
    return atoms


def _unit(even: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
    length = (even.square().sum(1, keepdim=True) + odd.square().sum(1, keepdim=True)).sqrt().clamp(min=1e-12)
    return even / length, odd / length


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
