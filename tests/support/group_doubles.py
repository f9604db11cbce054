"""Mistakes that only a training step of several processes can make, and audits of them on every rank.

    python -m tests.support.group_doubles

prints the table of ``docs/audit.md``: what each audit says, through two real processes.
"""

import contextlib
import itertools
from functools import partial
from unittest import mock

import numpy as np
import torch
import typer
from torch import distributed as dist
from torch import nn
from typer.testing import CliRunner

from spectral_dp import audit
from spectral_dp.audit.checks.noise_law import check_noise_law
from spectral_dp.audit.checks.sampling import check_sampling
from spectral_dp.audit.targets.group import ScriptShare
from spectral_dp.cli import audit as cli
from spectral_dp.experiments import audit_target
from spectral_dp.mechanism.noise import NoiseSource
from spectral_dp.models import registry
from spectral_dp.training import engine
from spectral_dp.training.coins import SecureCoins, SeededCoins
from spectral_dp.training.distributed import shares
from spectral_dp.training.distributed.ranks import Ranks, current_ranks
from spectral_dp.training.distributed.shard import ShardCoins
from spectral_dp.training.distributed.shares import NoiseShare
from tests.support import small_targets as small
from tests.support.processes import Processes

EFFORT = audit.Effort(1, canary_blocks=4, per_block=8, scores=6_000, run_scores=30, steps=40, noise_steps=32, calls=60)
CONFIDENCE = 0.99

#: Which audits must catch which mistake; others may.
CAUGHT_BY = {
    "none": set(),
    "noise in full on every rank": {"noise law"},  # more noise than claimed is private, but not what is claimed
    "one share only": {"linear map", "noise law"},
    "one share that starts again in every layer": {"noise law"},
    "shards sampled at rate qR": {"sampling"},
    "every rank draws from all records": {"sampling", "neighbours, over a run"},
    "one key for the coins of all ranks": {"sampling"},
    "division by the realised batch": {"neighbours", "batch size"},
    "average in place of the sum": {"noise law"},
}


class Nothing(NoiseSource):
    """The share of a rank that leaves the noise to another one."""

    is_private = False

    def __init__(self, noise, ranks):
        pass

    def normal(self, shape, *, dtype=torch.float32, device="cpu"):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


class StartedAgain(NoiseShare):
    """The share of a rank whose generator is seeded anew for each layer of a step: layers have the same noise."""

    releases = itertools.count()

    def __init__(self, noise, ranks):
        super().__init__(noise, ranks)
        self._seed = next(self.releases)

    def normal(self, shape, *, dtype=torch.float32, device="cpu"):
        share = super().normal(shape, dtype=dtype, device=device)
        if isinstance(self._noise, ScriptShare):  # what is wrong is the source, which the auditor replaces
            return share
        return share.normal_(generator=torch.Generator().manual_seed(self._seed)) / self._ranks**0.5


def in_full(noise, ranks):
    """A share that is all of the noise."""
    return NoiseShare(noise, 1)


class AtTheRateOfAll(ShardCoins):
    """The batch size is taken for that of a rank, so that the shard is sampled at rate qR."""

    def tosses(self, size, sample_rate, epoch, first_step):
        return super().tosses(size, self.size * sample_rate, epoch, first_step)


class OfAllRecords(ShardCoins):
    """Every rank draws from all records, as if it were alone."""

    def tosses(self, size, sample_rate, epoch, first_step):
        return SecureCoins().tosses(size, sample_rate, epoch, first_step)


class OfOneKey(ShardCoins):
    """Every rank tosses for its own shard, but from the key of all, so that records are drawn in pairs."""

    def tosses(self, size, sample_rate, epoch, first_step):
        own = len(range(self.rank, size, self.size))
        coins = SeededCoins(0, reproducibility_over_privacy=True)
        return (self.rank + self.size * drawn for drawn in coins.tosses(own, sample_rate, epoch, first_step))


class RealisedBatch(audit.SpectralTarget):
    """The sum over ranks is divided by the number of records that all ranks drew."""

    _rows = 0

    def _backward(self, modules, rows):
        self._rows += len(rows)
        super()._backward(modules, rows)

    def _steps(self, training, records):
        for released in super()._steps(training, records):
            rows, self._rows = self._rows, 0
            drawn = sum(current_ranks().of_each(rows, "the number of records"))
            yield released * training.optimizer.expected_batch_size / max(drawn, 1)


def averaged(plain):
    """As gradients are in DistributedDataParallel."""
    return lambda self, tensors, ranks: [tensor / ranks for tensor in plain(self, tensors, ranks)]


def broken(mistake):
    """Makes the mistake of this name on this rank, within a ``with`` block."""
    if mistake == "noise in full on every rank":
        return mock.patch.object(shares, "NoiseShare", in_full)
    if mistake == "one share only" and dist.get_rank() > 0:
        return mock.patch.object(shares, "NoiseShare", Nothing)
    if mistake == "one share that starts again in every layer" and dist.get_rank() > 0:
        return mock.patch.object(shares, "NoiseShare", StartedAgain)
    if mistake == "shards sampled at rate qR":
        return mock.patch.object(engine, "ShardCoins", AtTheRateOfAll)
    if mistake == "every rank draws from all records":
        return mock.patch.object(engine, "ShardCoins", OfAllRecords)
    if mistake == "one key for the coins of all ranks":
        return mock.patch.object(engine, "ShardCoins", OfOneKey)
    if mistake == "average in place of the sum":
        return mock.patch.object(Ranks, "added", averaged(Ranks.added))
    return contextlib.nullcontext()


def target(mistake, **options):
    """A small network with every kind of layer, filtered, of which all ranks make the step."""
    kind = RealisedBatch if mistake == "division by the realised batch" else audit.SpectralTarget
    return small.target(kind=kind, spectral=small.CONFIGS["filtered"], **options)


def report(mistake, **options):
    """The whole report of this rank: the name of the target, and each verdict."""
    with broken(mistake):
        made = audit.run_audit(target(mistake, **options), effort=EFFORT, confidence=CONFIDENCE, seed=0)
    return made.target, {v.audit: v for v in made.verdicts}


def noise_audits(mistake, seed):
    """The audits of the noise only: the linear map, and the law of 16 releases."""
    with broken(mistake):
        made = target(mistake, seed=seed)
        generator = torch.Generator().manual_seed(0)
        noise = audit.find_noise_map(made)
        linear_map = audit.check_linear_map(made, noise, made.blocks(1, generator), generator)
        return {v.audit: v for v in (linear_map, check_noise_law(made, noise, 16, 1 - 1e-6))}


def sampling_audits(mistake, seed):
    """The audits of a run with the batches of its ranks."""
    with broken(mistake):
        made = target(mistake, seed=seed)
        found = check_sampling(made, small.largest_flock(made), 40, CONFIDENCE, np.random.default_rng(0))
        return {v.audit: v for v in found}


def neighbour_audits(mistake, seed):
    """The audits of hostile records, and of batches of all sizes."""
    with broken(mistake):
        made = target(mistake, seed=seed)
        return {v.audit: v for v in audit.check_neighbours(made, torch.Generator().manual_seed(0))}


def command(arguments, mistake):
    """What ``spectral-dp audit`` prints, and its exit code, as one of the processes that it starts."""
    light = audit.Effort(1, canary_blocks=1, per_block=4, scores=200, run_scores=8, steps=4, noise_steps=4, calls=8)
    entry = registry.Entry(lambda input_shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))
    app = typer.Typer()
    app.command()(cli.audit_command)
    with (
        broken(mistake),
        mock.patch.dict(registry._REGISTRY, {"tiny": entry}),
        mock.patch.object(audit, "FAST", light),
        mock.patch.object(audit_target, "SpectralTarget", partial(audit.SpectralTarget, seed=0)),
        mock.patch.object(cli, "among_ranks", return_value=contextlib.nullcontext(dist.get_rank() == 0)),  # already
    ):
        result = CliRunner().invoke(app, ["--model", "tiny", "--audit-seed", "0", *arguments])
    return result.exit_code, result.stdout


def table():
    """Audits every mistake in two processes, and returns a table in Markdown."""
    pool = Processes()
    try:
        program = "tests.support.group_doubles:report"
        found = {name: pool.run(2, program, name, timeout=300.0)[0][1] for name in CAUGHT_BY}
    finally:
        pool.stop()
    audits = list(found["none"])
    lines = [f"| mistake | {' | '.join(audits)} |", "|---" * (len(audits) + 1) + "|"]
    for name, verdicts in found.items():
        cells = [f"{v.measured:.3g}" if v.ok else f"**{v.measured:.3g}**" for v in verdicts.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
