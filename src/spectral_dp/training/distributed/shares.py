"""Noise in shares: each of ``R`` ranks adds ``N(0, (σ Δ)² / R)`` to its sum, so that the total has ``N(0, (σ Δ)²)``.

This is the one place in which a number of ranks meets the noise. The number is not a setting: it is the sum of a 1 from
each rank, counted when the noise is drawn and counted again in the all-reduce that adds the shares.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spectral_dp.mechanism.clipping import Clipped
from spectral_dp.mechanism.noise import NoiseSource
from spectral_dp.mechanism.perturbation import add_noise, add_noise_to_each
from spectral_dp.relations import Relation
from spectral_dp.training.distributed.ranks import Ranks, current_ranks


def add_noise_alone(
    sums: Iterable[Clipped], noise_multiplier: float, noise: NoiseSource, relation: Relation
) -> Iterator[Tensor]:
    """Yields the noisy sums of a run of one process, as :func:`add_noise_to_each` does.

    Raises:
        RuntimeError: If there is a group of several processes by now. Each of them would release a model of its own.
    """
    if (ranks := current_ranks()) is not None:
        raise RuntimeError(
            f"the {ranks.size} processes of this group were made private one by one, so each trains a model of its own "
            "on all records and spends its own budget: call torch.distributed.init_process_group() before make_private"
        )
    return add_noise_to_each(sums, noise_multiplier, noise, relation)


class SharedNoise:
    """Adds noise in shares to the clipped sums of all ranks, and returns the total on every rank.

    Formal guarantee. What is returned is the sum over ranks of the clipped values plus ``N(0, (σ Δ)²)`` on every
    coordinate, where ``Δ`` is the sensitivity that the clipped values declare:

    * The sum over ranks declares the same sensitivity as the sum of one rank, because each record is in the shard of
      one rank (see ``shard.py``) and moves that rank's sum only.
    * ``R`` ranks add independent ``N(0, (σ Δ)² / R)``. ``R`` is counted in the meeting just before. If other ranks than
      those take part in the all-reduce, nothing is returned.
    * Assumptions: the ranks follow the protocol and trust each other (``docs/privacy.md`` says what a curious rank
      learns), and their noise sources are independent.

    Args:
        ranks: The ranks of the run.
        facts: A function that returns what else must be equal on all ranks before anything is released.
    """

    def __init__(self, ranks: Ranks, facts: Callable[[], Mapping[str, object]]) -> None:
        self._ranks, self._facts = ranks, facts

    def __call__(
        self, sums: Iterable[Clipped], noise_multiplier: float, noise: NoiseSource, relation: Relation
    ) -> Iterator[Tensor]:
        """Yields the noisy total of each of the sums. The arguments are those of :func:`add_noise`."""
        own = list(sums)
        planned = {
            "noise multiplier": noise_multiplier,
            "relation": str(relation),
            "sums": [(tuple(each.value.shape), str(each.value.dtype), each.max_norm) for each in own],
        }
        meeting = self._ranks.meet("a release", {**planned, **self._facts()})
        share = NoiseShare(noise, meeting.ranks)
        noisy = [add_noise(each, noise_multiplier, share, relation) for each in own]
        yield from self._ranks.added(noisy, meeting.ranks)


class NoiseShare(NoiseSource):
    """One of ``ranks`` equal shares of standard normal values: ``N(0, 1 / ranks)``, never less.

    Args:
        noise: The source of the rank.
        ranks: The number of shares.
    """

    def __init__(self, noise: NoiseSource, ranks: int) -> None:
        self.is_private = noise.is_private
        self._noise, self._ranks = noise, ranks

    def normal(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns new normal values of variance ``1 / ranks``."""
        # Torch rounds factor and product to the type of the numbers: two of its steps more than make up for that.
        factor = (1 + 2 * torch.finfo(dtype).eps) / math.sqrt(self._ranks)
        return self._noise.normal(shape, dtype=dtype, device=device).mul_(factor)


class RankNoise(NoiseSource):
    """Reproducible noise that differs between ranks, for experiments.

    All ranks hold the same seeded source. For each request they draw the same key from it, and each rank makes its own
    values of the key and its number. So the state of the source is equal on all ranks, and a checkpoint of it can be
    continued by any number of them.

    Args:
        common: The seeded source, which is the same on every rank.
        rank: The number of this rank.
    """

    is_private = False

    def __init__(self, common: NoiseSource, rank: int) -> None:
        self._common, self._rank = common, rank

    def normal(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Returns the next standard normal values of this rank."""
        key = self._common.normal((4,), dtype=torch.float64).numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(key + self._rank.to_bytes(8, "big")).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tuple(shape), generator=generator, dtype=dtype).to(device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the common source."""
        return self._common.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of the common source."""
        self._common.load_state_dict(state)
