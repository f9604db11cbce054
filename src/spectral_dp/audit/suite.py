"""Makes all audits of one target, fast or thorough, and collects their verdicts in one report."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from spectral_dp.audit.checks import canaries
from spectral_dp.audit.checks.every_call import check_every_call, first_calls
from spectral_dp.audit.checks.linear_map import check_linear_map
from spectral_dp.audit.checks.neighbours import check_neighbours
from spectral_dp.audit.checks.noise_law import check_noise_law
from spectral_dp.audit.checks.sampling import check_sampling
from spectral_dp.audit.instruments.flock import Flock, make_flocks
from spectral_dp.audit.instruments.noise_search import Unstructured, find_noise_map
from spectral_dp.audit.report import Report, Verdict
from spectral_dp.audit.statistics.bounds import corrected
from spectral_dp.audit.statistics.coverage import Coverage
from spectral_dp.audit.targets.target import Target
from spectral_dp.training.distributed.ranks import current_ranks

#: The lines of a report, in order. Some targets allow only a part of them.
AUDITS = (
    "accounting",
    "linear map",
    "neighbours",
    "batch size",
    "neighbours, not finite",
    "noise law",
    "noise, every call",
    "canaries, one step",
    "neighbours, over a run",
    "sampling",
    "canaries, many steps",
    "canaries, one run",
)

#: Audits of sampled runs.
SAMPLED = AUDITS[-4:]

#: Audits whose verdict is a matter of chance; they share the stated confidence.
STATISTICAL = 6

#: What a stated epsilon may be off by, relatively: accountants round.
ACCOUNTING_SLACK = 1e-3


@dataclass(frozen=True)
class Effort:
    """How much an audit looks at.

    Attributes:
        blocks: Number of blocks of every layer that the linear-map audit looks at.
        canary_blocks: Number of blocks of every layer that hold canaries.
        per_block: Number of canaries in each of them.
        scores: Approximate number of canary scores of single steps.
        run_scores: Least number of canaries in sampled runs. Where one run has fewer, several are made.
        steps: Most steps of a sampled run. A run has no more steps than are claimed.
        noise_steps: Number of releases whose noise is tested number by number.
        calls: Least number of releases whose noise is tested each by itself. They are the first steps of a run, and all
            its steps if ``steps`` allows.
        thorough: Whether every hostile record is tried at every place of every batch.
    """

    blocks: int
    canary_blocks: int
    per_block: int
    scores: int
    run_scores: int
    steps: int
    noise_steps: int
    calls: int = 1_000
    thorough: bool = False


#: Takes below a minute for a network like LeNet-5.
FAST = Effort(2, canary_blocks=80, per_block=6, scores=20_000, run_scores=1_000, steps=300, noise_steps=32)

#: Takes below half an hour for the paper's networks, and looks at every step that is claimed.
FULL = Effort(
    8,
    canary_blocks=160,
    per_block=8,
    scores=120_000,
    run_scores=6_000,
    steps=1 << 20,
    noise_steps=200,
    calls=5_000,
    thorough=True,
)


def run_audit(
    target: Target,
    *,
    effort: Effort = FAST,
    confidence: float = 0.99,
    seed: int | None = None,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
) -> Report:
    """Makes every audit that the target allows.

    In a process group every rank calls this, and gets the same report of the step that they make together.

    Formal guarantee:

    * Bounded: the report accuses a target that is what it claims with probability at most ``1 - confidence``.
    * What it claims: Gaussian noise of the claimed deviation, independent for every released coordinate; contributions
      bounded as claimed; Poisson sampling.
    * The converse is not guaranteed. A report without a violation is no proof of privacy: ``docs/audit.md`` says what
      each audit cannot show.

    Args:
        target: The target to audit.
        effort: How much to look at.
        confidence: Probability with which a target that is what it claims must pass. It is shared among the audits
            whose verdict is a matter of chance.
        seed: Seed of what the *auditor* chooses at random (blocks, directions, coins). If None, it is drawn afresh.
        on_verdict: Called with every verdict as soon as it is made. ``AUDITS`` lists their names.
    """
    ranks = current_ranks()
    if ranks is not None:  # the auditor of every rank makes the same choices
        seed = ranks.of_first(lambda: secrets.randbits(62) if seed is None else seed, "the beginning of an audit")
    suite = _Suite(target, effort, corrected(confidence, STATISTICAL), seed)
    verdicts, began = list[Verdict](), perf_counter()
    for verdict in suite.verdicts():
        verdicts.append(replace(verdict, seconds=perf_counter() - began))
        on_verdict(verdicts[-1])
        began = perf_counter()
    return Report(target.name, _claim(target), tuple(verdicts), suite.scores, suite.coverage)


class _Suite:
    """The audits of one target, made one after another.

    Attributes:
        scores: The canary scores of single steps, by whether the canary was in the batch.
        coverage: Which calls of the target had their noise looked at.
    """

    def __init__(self, target: Target, effort: Effort, confidence: float, seed: int | None) -> None:
        self._target, self._effort, self._confidence = target, effort, confidence
        entropy = np.random.SeedSequence(seed)
        self._generator = torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))
        self._coins = np.random.default_rng(entropy)
        self.scores: dict[str, Any] = {}
        self.coverage: Coverage | None = None

    def verdicts(self) -> Iterator[Verdict]:
        """Yields every verdict as soon as it is made."""
        target, effort, confidence, generator = self._target, self._effort, self._confidence, self._generator
        yield from _accounting(target)
        first = first_calls(target, effort.steps, effort.calls)  # before anything else: they may be special ones
        noise = None
        if target.controls_noise:
            try:
                noise = find_noise_map(target)
            except Unstructured as error:
                yield Verdict.left_out("linear map", str(error))
            else:
                yield check_linear_map(target, noise, target.blocks(effort.blocks, generator), generator)
            yield from check_neighbours(target, generator, thorough=effort.thorough)
        else:
            reason = "the noise does not come from torch, so it cannot be switched off: statistics only"
            yield from _left_out(("linear map", "neighbours", "batch size"), reason)
        yield check_noise_law(target, noise, effort.noise_steps, confidence)
        verdict, self.coverage = check_every_call(
            target, noise, effort.steps, effort.calls, confidence, generator, first
        )
        yield verdict
        blocks = target.blocks(effort.canary_blocks, generator)
        flocks = make_flocks(target, blocks, effort.per_block, generator, noise)
        if not flocks:
            reason = "no canary shows in a release: records far beyond the clipping bound are dropped, it seems"
            yield from _left_out(("canaries, one step", *SAMPLED), reason)
            return
        yield self._one_step(flocks)
        yield from self._sampled(max(flocks, key=lambda flock: len(flock.canaries)))

    def _one_step(self, flocks: list[Flock]) -> Verdict:
        wanted = self._effort.scores / len(flocks)
        rounds = [max(2, math.ceil(wanted / len(flock.canaries))) for flock in flocks]
        scores = canaries.StepScores.pooled(
            canaries.score_steps(self._target, flock, count, self._coins)
            for flock, count in zip(flocks, rounds, strict=True)
        )
        self.scores = {"inside": scores.values[scores.included], "outside": scores.values[~scores.included]}
        return canaries.check_one_step(scores, self._target, self._confidence)

    def _sampled(self, flock: Flock) -> Iterator[Verdict]:
        """Audits runs with the target's own sampling."""
        target, effort, claim = self._target, self._effort, self._target.claim
        if claim.moves != 1:
            yield from _left_out(SAMPLED, "made for neighbours by one record more or less")
            return
        if target.controls_noise:
            steps = min(max(4 * math.ceil(1 / claim.sample_rate), claim.steps), effort.steps)
            yield from check_sampling(target, flock, steps, self._confidence, self._coins)
        else:
            yield from _left_out(SAMPLED[:2], "needs the noise switched off")
        runs = math.ceil(effort.run_scores / len(flock.canaries))
        scores = canaries.score_runs(target, flock, min(claim.steps, effort.steps), runs, self._coins)
        yield canaries.check_many_steps(scores, target, self._confidence)
        yield canaries.check_one_run(scores, target, self._confidence)


def _accounting(target: Target) -> Iterator[Verdict]:
    """Compares a stated epsilon with what the other settings spend."""
    claim = target.claim
    others = f" and {len(claim.beside)} releases beside them" if claim.beside else ""
    if claim.stated_epsilon is not None:
        yield Verdict(
            "accounting",
            f"{claim.steps} steps at sample rate {claim.sample_rate:.4g}" + others,
            "epsilon stated",
            claim.stated_epsilon,
            claim.total_epsilon if claim.beside else claim.epsilon,
            "at most",
            slack=ACCOUNTING_SLACK * claim.stated_epsilon,
            note=f"noise multiplier {claim.noise_multiplier:.4g}",
        )


def _left_out(names: Sequence[str], reason: str) -> list[Verdict]:
    return [Verdict.left_out(name, reason) for name in names]


def _claim(target: Target) -> dict[str, Any]:
    """Returns the claim as plain values, with the epsilon that follows from it, also with the releases beside it."""
    claim = asdict(target.claim) | {"epsilon": target.claim.epsilon, "relation": str(target.claim.relation)}
    claim["total_epsilon"] = target.claim.total_epsilon if target.claim.beside else None
    return {name: value for name, value in claim.items() if value not in (None, ())}
