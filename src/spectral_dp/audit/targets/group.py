"""The training step of several processes as a target.

Every rank of the process group makes the same audit: the auditor's choices come from one seed, and what a release
returns is the same everywhere. So the calls of all ranks meet in the all-reduce of the audited step. Each rank
takes part with the records of its own shard and with its own share of the noise, as in training.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spectral_dp.audit.targets.noise_control import Script, ScriptedCoins
from spectral_dp.mechanism.noise import NoiseSource
from spectral_dp.training.coins import Coins
from spectral_dp.training.distributed.joining import share_model
from spectral_dp.training.distributed.ranks import Ranks, RanksError
from spectral_dp.training.distributed.shard import ShardCoins


def model_of_first(ranks: Ranks, model: nn.Module) -> nn.Module:
    """Returns a copy of the model with the parameters that it has on rank 0, so that all ranks audit the same one."""
    shared = copy.deepcopy(model)
    share_model(ranks, shared)
    return shared


def chosen_coins(ranks: Ranks | None, records: int) -> Coins:
    """Returns coins that fall on the first so many records. Each of several ranks gets those of its own shard."""
    if ranks is None:
        return ScriptedCoins(records)
    own = len(range(ranks.rank, records, ranks.size))
    return ShardCoins(ScriptedCoins(own), ranks.rank, ranks.size)


class ScriptShare(NoiseSource):
    """What a script serves to one rank.

    The numbers that all ranks ask for are side by side in the script: for each request those of rank 0, then those of
    rank 1, and so on. Every rank reads all of them and keeps its own, so no number reaches two ranks.

    Args:
        script: The script, which is the same on every rank.
        ranks: The ranks of the run.
    """

    is_private = False

    def __init__(self, script: Script, ranks: Ranks) -> None:
        self._script, self._ranks = script, ranks

    def normal(
        self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Returns the next numbers of this rank."""
        served = [self._script.normal(shape, dtype=dtype, device=device) for _ in range(self._ranks.size)]
        return served[self._ranks.rank]


def count_draws(ranks: Ranks, script: Script) -> None:
    """Makes the script of every rank say how many numbers the ranks asked for together.

    A rank that asked for none adds no noise, which the audits of the noise will see.

    Raises:
        RanksError: If two ranks asked for different numbers, so that the script cannot be read as one stream.
    """
    asked = ranks.of_each(script.shapes, "the noise of an audited release")
    drew = [shapes for shapes in asked if shapes]
    if any(shapes != drew[0] for shapes in drew):
        listed = "; ".join(f"rank {rank} for {len(shapes)} tensors" for rank, shapes in enumerate(asked))
        raise RanksError(f"the ranks asked for different noise for the same release: {listed}")
    script.take_over(drew[0] if drew else [])


def require_same_release(ranks: Ranks, release: Tensor) -> None:
    """Raises ``RanksError`` unless all ranks released the same numbers: else they train different models."""
    digest = hashlib.blake2b(release.numpy().tobytes(), digest_size=16).hexdigest()
    ranks.meet("the end of an audited release", {"released numbers": digest})
