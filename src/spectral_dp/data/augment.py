"""Random views of images, for augmentation multiplicity: several views of a sample count as one sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from spectral_dp.data.errors import DataError


def random_views(
    images: Tensor,
    augmentation_multiplicity: int,
    *,
    flip: bool,
    shift: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draws views of each image: a horizontal flip with probability 1/2 and a uniform shift, independent per view.

    Args:
        images: ``(B, C, H, W)``, of any type; uint8 stays uint8.
        augmentation_multiplicity: Number of views of each image K, at least 1.
        flip: Whether to flip.
        shift: Largest shift in pixels, in each direction, along each axis; 0 for none. Zeros come in at the edge.
        generator: Generator to draw from. If None, it is the default generator of the device that holds the images.

    Returns:
        ``(B * K, C, H, W)``; the views of a sample are neighbours, which is the order that the engine's augmentation
        multiplicity expects.

    >>> views = random_views(torch.arange(2, dtype=torch.uint8).view(2, 1, 1, 1), 3, flip=True, shift=0)
    >>> views.flatten().tolist()
    [0, 0, 0, 1, 1, 1]
    """
    if images.dim() != 4:
        raise DataError(f"images are (B, C, H, W), got shape {tuple(images.shape)}")
    if augmentation_multiplicity < 1 or shift < 0:
        raise DataError(
            f"an augmentation_multiplicity of at least 1 and a shift of at least 0 pixels are needed, "
            f"got {augmentation_multiplicity} and {shift}"
        )
    samples, _, height, width = images.shape
    device = images.device if generator is None else generator.device
    # Three words a view, in the order of the views: a batch that comes in parts gets the views that it would get whole.
    shape = (samples * augmentation_multiplicity, 3)
    words = torch.randint(2**31, shape, generator=generator, device=device).to(images.device)
    if shift:
        # All windows of the padded image, as a view without copies: (B, C, 2 shift + 1, 2 shift + 1, H, W).
        padded = functional.pad(images, (shift, shift, shift, shift))
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        down, right = (words[:, :2] % (2 * shift + 1)).unbind(1)  # of 2^31 words: uniform to within 1e-7
        sample = torch.arange(samples, device=images.device).repeat_interleave(augmentation_multiplicity)
        result = windows[sample, :, down, right]
    else:
        result = images.repeat_interleave(augmentation_multiplicity, dim=0)
    if flip:
        mirrored = (words[:, 2] % 2).bool().view(-1, 1, 1, 1)
        result = torch.where(mirrored, result.flip(-1), result)
    return result
