"""Patches of images in mirror coordinates: what stays and what changes its sign when a patch is mirrored.

For each pair of pixels ``p, p'`` that mirroring swaps, the coordinates are ``(p + p') / √2`` (*even*) and
``(p - p') / √2`` (*odd*); the middle column of a patch of odd size is even. These coordinates are orthonormal. A vector
``d`` and its mirror image have the same even part, and odd parts of opposite signs, so

    <p, d> = S + A,    <p, mirrored d> = S - A    with S = <p, d>_even and A = <p, d>_odd :

two products of half the length give the responses to both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Added to the variance of a patch, so that patches of one colour are not blown up: ten steps of a byte, squared.
CONTRAST_FLOOR = (10 / 255) ** 2


def from_mirror_coordinates(even: Tensor, odd: Tensor, channels: int, size: int) -> Tensor:
    """Returns the patches ``(n, C, s, s)`` of these coordinates. It undoes :func:`normalised_patches`' split."""
    half = size // 2
    even = even.view(len(even), channels, size, size - half)
    odd = odd.view(len(odd), channels, size, half)
    left, right = ((even[..., :half] + sign * odd) * math.sqrt(0.5) for sign in (1, -1))
    return torch.cat([left, even[..., half:], right.flip(-1)], dim=-1)


def normalised_patches(images: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Returns all patches of images, contrast-normalised, in mirror coordinates.

    A patch ``p`` becomes ``(p - mean) / sqrt(variance + CONTRAST_FLOOR)``. Coordinates come first and positions last:
    that way no patch is copied together, and each coordinate of a row of positions is one sum of two pieces of rows.

    Args:
        images: Pixels from 0 to 1, ``(B, C, H, W)`` in float32.
        size: The side ``s`` of a patch.

    Returns:
        The even coordinates ``(C s ceil(s/2), B, H - s + 1, W - s + 1)``, and the odd ones in the same form.
    """
    count, channels, height, width = images.shape
    down, across, half = height - size + 1, width - size + 1, size // 2
    x = images.transpose(0, 1)
    even = x.new_empty(channels, size, size - half, count, down, across)
    odd = x.new_empty(channels, size, half, count, down, across)
    for row in range(size):
        pixels = x[:, :, row : row + down]
        for left in range(half):
            right = size - 1 - left
            one, two = pixels[..., left : left + across], pixels[..., right : right + across]
            torch.add(one, two, out=even[:, row, left])
            torch.sub(one, two, out=odd[:, row, left])
        if size % 2:
            torch.mul(pixels[..., half : half + across], math.sqrt(2), out=even[:, row, half])
    # So far, coordinates are √2 times what they should be; the last factor corrects it.
    even, odd, numbers = even.flatten(0, 2), odd.flatten(0, 2), channels * size**2
    ones = x.new_full((channels, size, size - half), math.sqrt(2))  # the coordinates of a patch of ones
    if size % 2:
        ones[..., half] = 1
    ones = ones.flatten()
    mean = (ones @ even.flatten(1)).div_(math.sqrt(2) * numbers)
    even.flatten(1).addcmul_(ones[:, None], mean, value=-math.sqrt(2))
    variance = even.square().sum(0).add_(odd.square().sum(0)).div_(2 * (numbers - 1))
    factor = variance.add_(CONTRAST_FLOOR).rsqrt_().mul_(math.sqrt(0.5))
    return even.mul_(factor), odd.mul_(factor)
