"""Makes all audits of one target, fast or thorough, and collects their verdicts in one report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from spectral_dp.audit.checks.canaries import (
    StepScores,
    check_many_steps,
    check_one_run,
    check_one_step,
    score_runs,
    score_steps,
)
from spectral_dp.audit.checks.every_call import check_every_call, first_calls
from spectral_dp.audit.checks.linear_map import check_linear_map
from spectral_dp.audit.checks.neighbours import check_neighbours
from spectral_dp.audit.checks.noise_law import check_noise_law
from spectral_dp.audit.checks.sampling import check_sampling
from spectral_dp.audit.instruments.flock import Flock, make_flocks
from spectral_dp.audit.instruments.noise_map import NoiseMap
from spectral_dp.audit.instruments.noise_search import Unstructured, find_noise_map
from spectral_dp.audit.report import Report, Verdict, timed
from spectral_dp.audit.statistics.bounds import corrected
from spectral_dp.audit.targets.target import Target

#: What :func:`run_audit` does, in order.
STAGES = (
    "linear map",
    "neighbours",
    "noise law",
    "noise of every call",
    "canaries in one step",
    "sampling",
    "canaries over many steps",
)

#: Audits of sampled runs.
SAMPLED = ("neighbours, over a run", "sampling", "canaries, many steps", "canaries, one run")

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

#: Is told the name of a stage when it begins.
StageCallback = Callable[[str], None]


def run_audit(
    target: Target,
    *,
    effort: Effort = FAST,
    confidence: float = 0.99,
    seed: int | None = None,
    on_stage: StageCallback = lambda stage: None,
) -> Report:
    """Makes every audit that the target allows.

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
        on_stage: Called with the name of every stage when it begins. ``STAGES`` lists them.
    """
    entropy = np.random.SeedSequence(seed)
    generator = torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))
    coins = np.random.default_rng(entropy)
    each = corrected(confidence, STATISTICAL)
    verdicts = _accounting(target)
    first = first_calls(target, effort.steps, effort.calls)  # before anything else: they may be special ones
    noise: NoiseMap | None = None
    on_stage(STAGES[0])
    if target.controls_noise:
        noise, verdict = _linear_map(target, effort, generator)
        verdicts.append(verdict)
        on_stage(STAGES[1])
        verdicts += check_neighbours(target, generator, thorough=effort.thorough)
    else:
        reason = "the noise does not come from torch, so it cannot be switched off: statistics only"
        verdicts += [Verdict.left_out(name, reason) for name in ("linear map", "neighbours", "batch size")]
    on_stage(STAGES[2])
    verdicts.append(check_noise_law(target, noise, effort.noise_steps, each))
    on_stage(STAGES[3])
    verdict, coverage = check_every_call(target, noise, effort.steps, effort.calls, each, generator, first)
    verdicts.append(verdict)
    on_stage(STAGES[4])
    with timed() as watch:
        blocks = target.blocks(effort.canary_blocks, generator)
        flocks = make_flocks(target, blocks, effort.per_block, generator, noise)
    if not flocks:
        reason = "no canary shows in a release: records far beyond the clipping bound are dropped, it seems"
        verdicts += [Verdict.left_out(name, reason) for name in ("canaries, one step", *SAMPLED)]
        return Report(target.name, _claim(target), tuple(verdicts), coverage=coverage)
    scores, verdict = _one_step(target, flocks, effort, each, coins, watch.seconds)
    verdicts.append(verdict)
    largest = max(flocks, key=lambda flock: len(flock.canaries))
    verdicts += _sampled(target, largest, effort, each, coins, on_stage)
    shown = {"inside": scores.values[scores.included], "outside": scores.values[~scores.included]}
    return Report(target.name, _claim(target), tuple(verdicts), shown, coverage)


def _accounting(target: Target) -> list[Verdict]:
    """Whether a stated epsilon is what the other settings spend."""
    claim = target.claim
    if claim.stated_epsilon is None:
        return []
    with timed() as watch:
        spent = claim.epsilon
    return [
        Verdict(
            audit="accounting",
            tested=f"{claim.steps} steps at sample rate {claim.sample_rate:.4g}",
            quantity="epsilon stated",
            claimed=claim.stated_epsilon,
            measured=spent,
            wanted="at most",
            confidence=None,
            ok=spent <= claim.stated_epsilon * (1 + ACCOUNTING_SLACK),
            seconds=watch.seconds,
            note=f"noise multiplier {claim.noise_multiplier:.4g}",
        )
    ]


def _linear_map(target: Target, effort: Effort, generator: torch.Generator) -> tuple[NoiseMap | None, Verdict]:
    with timed() as watch:
        try:
            noise = find_noise_map(target)
        except Unstructured as error:
            return None, Verdict.left_out("linear map", str(error))
    verdict = check_linear_map(target, noise, target.blocks(effort.blocks, generator), generator)
    return noise, replace(verdict, seconds=verdict.seconds + watch.seconds)


def _one_step(
    target: Target,
    flocks: list[Flock],
    effort: Effort,
    confidence: float,
    coins: np.random.Generator,
    seconds: float,
) -> tuple[StepScores, Verdict]:
    with timed() as watch:
        scores = StepScores.pooled(
            score_steps(target, flock, _rounds(effort.scores / len(flocks), flock), coins) for flock in flocks
        )
    return scores, check_one_step(scores, target, confidence, seconds + watch.seconds)


def _sampled(
    target: Target,
    flock: Flock,
    effort: Effort,
    confidence: float,
    coins: np.random.Generator,
    on_stage: StageCallback,
) -> list[Verdict]:
    claim = target.claim
    if claim.moves != 1:
        return [Verdict.left_out(name, "made for neighbours by one record more or less") for name in SAMPLED]
    verdicts = []
    on_stage(STAGES[5])
    if target.controls_noise:
        steps = min(max(4 * math.ceil(1 / claim.sample_rate), claim.steps), effort.steps)
        verdicts += check_sampling(target, flock, steps, confidence, coins)
    else:
        verdicts += [Verdict.left_out(name, "needs the noise switched off") for name in SAMPLED[:2]]
    on_stage(STAGES[6])
    with timed() as watch:
        runs = math.ceil(effort.run_scores / len(flock.canaries))
        scores = score_runs(target, flock, min(claim.steps, effort.steps), runs, coins)
    return [
        *verdicts,
        check_many_steps(scores, target, confidence, watch.seconds),
        check_one_run(scores, target, confidence),
    ]


def _rounds(scores: float, flock: Flock) -> int:
    return max(2, math.ceil(scores / len(flock.canaries)))


def _claim(target: Target) -> dict[str, Any]:
    claim = target.claim
    names = ("noise_multiplier", "max_grad_norm", "expected_batch_size", "sample_rate", "steps", "delta", "epsilon")
    stated = {} if claim.stated_epsilon is None else {"stated_epsilon": claim.stated_epsilon}
    return {name: getattr(claim, name) for name in names} | {"relation": str(claim.relation)} | stated
