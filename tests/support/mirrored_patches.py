"""Mirror coordinates of patches, one patch at a time: what ``normalised_patches`` computes for whole images."""

import math

import torch
from torch import Tensor


def mirror_coordinates(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Returns even and odd coordinates of patches: ``(n, C, s, s) -> (n, C s ceil(s/2)), (n, C s floor(s/2))``."""
    half = patches.shape[-1] // 2
    left, right = patches[..., :half], patches.flip(-1)[..., :half]
    middle = patches[..., half : patches.shape[-1] - half]
    even = torch.cat([(left + right) * math.sqrt(0.5), middle], dim=-1)
    return even.flatten(1), ((left - right) * math.sqrt(0.5)).flatten(1)
