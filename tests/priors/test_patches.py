"""Mirror coordinates of patches: orthonormal, split by what mirroring does, and the same as by a plain unfold."""

import pytest
import torch
from tests.support.mirrored_patches import mirror_coordinates
from torch.nn import functional as F

from spectral_dp.priors import generate_images
from spectral_dp.priors.patches import (
    CONTRAST_FLOOR,
    from_mirror_coordinates,
    normalised_patches,
)

SIZES = [2, 5, 6]


def random_patches(size, channels=3, n=7):
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)


@pytest.mark.parametrize("size", SIZES)
def test_coordinates_are_orthonormal(size):
    p = random_patches(size)
    even, odd = mirror_coordinates(p)
    assert even.shape[1] + odd.shape[1] == 3 * size**2
    assert torch.allclose(even @ even.T + odd @ odd.T, p.flatten(1) @ p.flatten(1).T)
    assert torch.allclose(from_mirror_coordinates(even, odd, 3, size), p)


@pytest.mark.parametrize("size", SIZES)
def test_mirroring_turns_the_sign_of_odd_coordinates_only(size):
    p = random_patches(size)
    (even, odd), (same, turned) = mirror_coordinates(p), mirror_coordinates(p.flip(-1))
    assert torch.allclose(same, even)
    assert torch.allclose(turned, -odd)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_normalised_patches_are_those_of_an_unfold(size, channels):
    """Two independent implementations: sums of rows of pixels, and patches that are copied together one by one."""
    images = generate_images("dead-leaves", 4, (channels, 9, 11)).float() / 255
    even, odd = normalised_patches(images, size)
    p = F.unfold(images.double(), size).transpose(1, 2).flatten(0, 1)
    p = (p - p.mean(1, keepdim=True)) / (p.var(1, keepdim=True) + CONTRAST_FLOOR).sqrt()
    expected = mirror_coordinates(p.view(-1, channels, size, size))
    for found, wanted in zip((even, odd), expected, strict=True):
        assert found.shape == (wanted.shape[1], 4, 9 - size + 1, 11 - size + 1)
        assert torch.allclose(found.flatten(1).T.double(), wanted, atol=1e-5)


def test_a_patch_of_one_colour_is_zero():
    """The contrast floor keeps rounding errors of flat patches from being blown up."""
    even, odd = normalised_patches(torch.full((1, 3, 8, 8), 0.7), 6)
    assert float(even.abs().max()) < 1e-4
    assert float(odd.abs().max()) == 0


def test_images_are_not_changed():
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    normalised_patches(images, 5)
    assert torch.equal(images, before)
