"""The broken mechanisms as audit targets, beside the sound one; and the table of which audit catches which.

    python -m tests.support.audit_doubles

prints the tables of ``docs/audit.md``.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from spectral_dp import accounting, audit
from spectral_dp.mechanism.noise import NoiseSource, SeededNoise
from tests.support import broken_mechanisms
from tests.support.block_map import BlockMap, find_block_map
from tests.support.broken_mechanisms import EXPECTED_BATCH, sound
from tests.support.privacy_checks import MAX_NORM, SIGMA

DIMENSION = 16
EFFORT = audit.Effort(2, canary_blocks=2, per_block=DIMENSION, scores=20_000, run_scores=600, steps=30, noise_steps=60)
CLAIM = audit.Claim(SIGMA, MAX_NORM, EXPECTED_BATCH, sample_rate=0.1, steps=60, delta=1e-5)
CONFIDENCE = 0.99
PAPER_BATCH = 500


class Twice(audit.FunctionTarget):
    """A sound release on batches that now and then hold a record twice."""

    def batches(self, records: int) -> Iterator[list[int]]:
        seed = self._seed + next(self._runs)
        return broken_mechanisms.batches_with_a_record_twice(records, self.claim.sample_rate, seed)


class Shuffled(audit.FunctionTarget):
    """A sound release on shuffled batches, claimed to be Poisson ones; with little noise, where it shows."""

    def batches(self, records: int) -> Iterator[list[int]]:
        batch = max(1, round(self.claim.sample_rate * records))
        return broken_mechanisms.shuffled_batches(records, batch, self._seed + next(self._runs))


def target(
    mechanism, seed: int = 0, claim: audit.Claim = CLAIM, kind=audit.FunctionTarget, dimension: int = DIMENSION
) -> audit.FunctionTarget:
    """A mechanism of ``broken_mechanisms`` as a target, with noise from a seed."""
    noise = SeededNoise(seed, reproducibility_over_privacy=True)
    return kind(
        lambda gradients: mechanism(gradients, noise),
        claim,
        dimension=dimension,
        returns="sum",
        name=mechanism.__name__,
        dtype=torch.float64,
        seed=seed,
    )


def counted_target(mistake, seed: int = 0) -> audit.FunctionTarget:
    """A mechanism that counts its calls, as a target that was not called yet."""
    return target(broken_mechanisms.counted(mistake), seed)


def little_noise(samples: Tensor, noise: NoiseSource) -> Tensor:
    """Sound, with the noise multiplier of ``SHUFFLED``."""
    return sound(samples, noise, SHUFFLED.noise_multiplier)


SHUFFLED = audit.Claim(0.25, MAX_NORM, EXPECTED_BATCH, sample_rate=0.125, steps=8, delta=1e-5)

DOUBLES = {m.__name__: partial(target, m) for m in (*broken_mechanisms.ALL, *broken_mechanisms.BY_VALUE)}
DOUBLES |= {m.__name__: partial(counted_target, m) for m in broken_mechanisms.BY_CALL}
DOUBLES["record_given_twice"] = partial(target, sound, kind=Twice)
DOUBLES["shuffling_as_poisson"] = partial(target, little_noise, claim=SHUFFLED, kind=Shuffled)


def power_table(seed: int = 0) -> str:
    """Audits the sound mechanism and every double; returns a table in Markdown: what each audit said."""
    reports = {
        name: audit.run_audit(make(seed), effort=EFFORT, confidence=CONFIDENCE, seed=seed)
        for name, make in {"sound": partial(target, sound), **DOUBLES}.items()
    }
    audits = [v.audit for v in reports["sound"].verdicts]
    lines = [" | ".join(["", "mechanism", *audits, ""]).strip(), "|".join(["", *["---"] * (len(audits) + 1), ""])]
    for name, report in reports.items():
        verdicts = {v.audit: v for v in report.verdicts}
        lines.append(" | ".join(["", name.replace("_", " "), *(_cell(verdicts[a]) for a in audits), ""]).strip())
    return "\n".join(lines)


def what_goes_out(seed: int = 0) -> str:
    """What mistakes of the paper's printed algorithm and public code release, in a block of 8, batches of 500.

    Returns a table in Markdown: the true noise multiplier, how many of the block's dimensions leave without noise, and
    what a run costs that was meant to spend epsilon 2 (60000 records, 30 epochs, delta 1e-5).
    """
    rate, steps = PAPER_BATCH / 60_000, 30 * 120
    meant = accounting.calibrate_noise(2.0, 1e-5, rate, steps)
    lines = ["| mistake | true / claimed noise multiplier | dimensions without noise | epsilon, meant to be 2 |"]
    lines.append("|---|---|---|---|")
    mistakes = ("real_only_noise", "noise_per_sample", "noise_on_both_halves", "unnoised_last_coefficient")
    for mechanism in (sound, *(getattr(broken_mechanisms, name) for name in mistakes)):
        made = target(mechanism, seed, dimension=8)
        noise = audit.find_noise_map(made, batch=PAPER_BATCH)
        generator = torch.Generator().manual_seed(seed)
        blocks = made.blocks(2, generator)
        found = audit.check_linear_map(made, noise, blocks, generator, batch=PAPER_BATCH)
        maps = find_block_map(made, noise, blocks[0], batch=PAPER_BATCH)
        share = found.measured / made.claim.noise_multiplier
        spent = accounting.epsilon(share * meant, rate, steps, 1e-5) if share else float("inf")
        name = mechanism.__name__.replace("_", " ")
        lines.append(f"| {name} | {share:.3g} | {_bare_dimensions(maps)} of 8 | {spent:.3g} |")
    return "\n".join(lines)


def _bare_dimensions(maps: BlockMap) -> int:
    """How many dimensions of the signal lie where there is no noise."""
    values, axes = torch.linalg.eigh(maps.Sigma)
    bare = axes[:, values < 1e-8 * values.max()]
    return int(torch.linalg.matrix_rank(bare.T @ maps.A, tol=1e-3)) if bare.numel() else 0


def _cell(verdict: audit.Verdict) -> str:
    if verdict.ok is None:
        return "-"
    return f"{verdict.measured:.3g}" if verdict.ok else f"**{verdict.measured:.3g}**"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(power_table(), what_goes_out(), sep="\n\n")
