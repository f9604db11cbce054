"""One release of a clipped sum: charged to a ledger first, then noised once."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from torch import Tensor, distributed

from spectral_dp.accounting import Ledger
from spectral_dp.mechanism.clipping import Clipped
from spectral_dp.mechanism.noise import NoiseSource, SecureNoise
from spectral_dp.mechanism.perturbation import add_noise


@torch.no_grad()  # what is released has no way back to the records
def release_sum(
    parts: Iterable[Clipped], *, noise_multiplier: float, ledger: Ledger, noise: NoiseSource | None = None
) -> Tensor:
    """Releases the sum of all records of a data set as one Gaussian mechanism.

    Formal guarantee:

    * What is bounded: every record contributes to one part only, and there at most the bound that the part declares. So
      the sum has that bound, too, and the noise is scaled by it.
    * For which neighbours: those of the ledger's relation.
    * What is charged: one step with this noise multiplier and sample rate 1, entered in the ledger before the release.
      If anything fails afterwards, it stays charged.
    * Under which assumptions: the bounds of the parts are true. That they are equal, and that the parts have one shape,
      is checked: a number that is added to a whole row would count as often as the row has numbers. One process makes
      the release: each of several would draw noise of its own, so that as many releases were made where one is charged.

    Args:
        parts: Clipped sums over some records each. There is at least one part, and it may be of no records.
        noise_multiplier: ``σ`` of the release.
        ledger: The ledger that the release is charged to.
        noise: The source of the noise. By default a new :class:`~spectral_dp.mechanism.noise.SecureNoise`.

    Returns:
        The noisy sum, in the shape of the parts.

    Raises:
        ValueError: If there is no part, or two parts have different bounds or shapes. Nothing is charged then.
        RuntimeError: If this is one of several processes. Nothing is charged then.
    """
    _require_one_process()
    total: Clipped | None = None
    for part in parts:
        if total is None:
            total = part
        elif part.max_norm != total.max_norm:
            raise ValueError(f"parts of one sum have one bound, got {total.max_norm} and {part.max_norm}")
        elif part.value.shape != total.value.shape:
            shapes = f"{tuple(total.value.shape)} and {tuple(part.value.shape)}"
            raise ValueError(f"parts of one sum have one shape, got {shapes}")
        else:
            total = Clipped(torch.add(total.value, part.value), part.max_norm, total.nonfinite + part.nonfinite)
    if total is None:
        raise ValueError("there is no part to release: give one of no records, whose shape the release has")
    ledger.record(noise_multiplier, 1.0)  # before the release
    return add_noise(total, noise_multiplier, noise or SecureNoise(), ledger.relation)


def number_of_processes() -> int:
    """Returns how many processes there are in the group of this one, or were started with it."""
    in_group = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if in_group else int(os.environ.get("WORLD_SIZE") or 1)


def _require_one_process() -> None:
    if (processes := number_of_processes()) > 1:
        raise RuntimeError(
            f"each of these {processes} processes would make this release with noise of its own, and only one is "
            "charged: make it in a program of one process, and give the result to the others"
        )
