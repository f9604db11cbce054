"""A source of noise that is silent, so that what is released can be compared with what was summed."""

import torch

from spectral_dp.mechanism.noise import NoiseSource


class Silent(NoiseSource):
    is_private = False

    def normal(self, shape, *, dtype=torch.float32, device="cpu"):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
