"""The canary audits: how well releases tell whether a record was there, against how well they may.

Mistakes hide in special coordinates, so scores are judged all together, by class of coordinate, and by layer, every
look at a confidence that is corrected for the others. Three lines of the report come from here:

* ``canaries, one step``: those in the batch are protected by the Gaussian mechanism of the claimed multiplier.
* ``canaries, many steps``: those in the data set are protected by the Poisson-sampled Gaussian, composed.
* ``canaries, one run``: the same run is (ε, δ)-DP, whatever its noise or sampling (Steinke et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from spectral_dp import accounting
from spectral_dp.audit.instruments.flock import Flock
from spectral_dp.audit.report import Verdict
from spectral_dp.audit.statistics.bounds import LowerBound, corrected, gaussian_lower_bound
from spectral_dp.audit.statistics.one_run import bound_from_guesses
from spectral_dp.audit.statistics.sampled import log_likelihood_ratio, sampled_lower_bound
from spectral_dp.audit.targets.target import Target

#: Fewer scores of a class than this are not judged by themselves.
FEWEST_SCORES = 24


@dataclass(frozen=True, eq=False)
class StepScores:
    """Scores of single steps, in deviations of the claimed noise.

    Attributes:
        values: The scores.
        included: Whether the canary of each score was in the batch.
        layers: The layer of its canary.
        kinds: The class of its coordinate.
    """

    values: NDArray[np.float64]
    included: NDArray[np.bool_]
    layers: NDArray[np.str_]
    kinds: NDArray[np.str_]

    @classmethod
    def pooled(cls, parts: Iterable[StepScores]) -> StepScores:
        """Scores of several flocks together."""
        parts = list(parts)
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def groups(self) -> dict[str, NDArray[np.bool_]]:
        """Masks for all scores, for those of each class and for those of each layer, where there are enough."""
        masks = {"all": np.ones(len(self.values), dtype=bool)}
        masks |= {f"class {k}": self.kinds == k for k in np.unique(self.kinds)}
        masks |= {f"layer {n}": self.layers == n for n in np.unique(self.layers)}
        fewest = {name: min(self.included[m].sum(), (~self.included[m]).sum()) for name, m in masks.items()}
        return {name: mask for name, mask in masks.items() if fewest[name] >= FEWEST_SCORES}


def score_steps(target: Target, flock: Flock, rounds: int, coins: np.random.Generator) -> StepScores:
    """Releases batches in which every canary takes part by a fair coin. Under replace-one, it or its opposite does."""
    values, included = [], []
    for _ in range(rounds):
        heads = coins.random(len(flock.canaries)) < 0.5
        batch = [c.record for c, head in zip(flock.canaries, heads, strict=True) if head]
        if target.claim.moves == 2:
            batch += [c.opposite for c, head in zip(flock.canaries, heads, strict=True) if not head]
        values.append(flock.scores(target.release(batch)) / target.claim.noise_std)
        included.append(heads)
    layers = np.tile([c.layer for c in flock.canaries], rounds)
    kinds = np.tile([c.kind for c in flock.canaries], rounds)
    return StepScores(np.concatenate(values), np.concatenate(included), layers, kinds)


def check_one_step(scores: StepScores, target: Target, confidence: float) -> Verdict:
    """Judges scores of single steps by the trade-off of the Gaussian mechanism."""
    claim = target.claim
    groups = scores.groups()
    each = corrected(confidence, max(len(groups), 1))
    bounds: dict[str, LowerBound] = {}
    for name, mask in groups.items():
        values, included = scores.values[mask], scores.included[mask]
        bounds[name] = gaussian_lower_bound(values[included], values[~included], delta=claim.delta, confidence=each)
    if not bounds:
        return Verdict.left_out("canaries, one step", f"{len(scores.values)} scores are too few to judge")
    worst = max(bounds, key=lambda name: bounds[name].epsilon)
    bound = bounds[worst]
    return Verdict(
        "canaries, one step",
        f"{len(scores.values)} scores, {len(groups)} looks",
        "epsilon of one step",
        claim.step_epsilon,
        bound.epsilon,
        "at most",
        confidence,
        note=f"most telling: {worst}, mu at least {bound.mu:.4g} (claimed {1 / claim.noise_multiplier:.4g})",
        details={
            name: {"mu": b.mu, "epsilon": b.epsilon, "scores_of_each_kind": b.trials} for name, b in bounds.items()
        },
    )


@dataclass(frozen=True, eq=False)
class RunScores:
    """Scores of a training run.

    Attributes:
        values: ``(m, T)``, for each canary and step, in units of the clipping bound.
        included: ``(m,)``: whether the canary was in the data.
        sample_rate: The probability that a record takes part in a step.
    """

    values: NDArray[np.float64]
    included: NDArray[np.bool_]
    sample_rate: float


def score_runs(target: Target, flock: Flock, steps: int, runs: int, coins: np.random.Generator) -> RunScores:
    """Trains on a data set in which every canary is by a fair coin, or else a record that contributes nothing.

    Several runs are one with more canaries, each of them in the data of one.
    """
    values, included, rate = [], [], target.claim.sample_rate
    for _ in range(runs):
        heads = coins.random(len(flock.canaries)) < 0.5
        records = [c.record if head else target.null() for c, head in zip(flock.canaries, heads, strict=True)]
        run = target.run(records, steps)
        rate = run.sample_rate
        releases = [flock.scores(release) / target.claim.max_grad_norm for release in run.releases]
        values.append(np.stack(releases, axis=1))
        included.append(heads)
    return RunScores(np.concatenate(values), np.concatenate(included), rate)


def check_many_steps(scores: RunScores, target: Target, confidence: float) -> Verdict:
    """Judges a run by the likelihood ratio of the sampled Gaussian, through the accountant's privacy loss."""
    claim, steps, rate = target.claim, scores.values.shape[1], scores.sample_rate
    if min(scores.included.sum(), (~scores.included).sum()) < 2:
        return Verdict.left_out("canaries, many steps", f"{len(scores.included)} canaries are too few to judge")
    bound = sampled_lower_bound(
        scores.values[scores.included],
        scores.values[~scores.included],
        noise_multiplier=claim.noise_multiplier,
        sample_rate=rate,
        steps=steps,
        delta=claim.delta,
        confidence=confidence,
    )
    return Verdict(
        "canaries, many steps",
        f"{len(scores.included)} canaries, {steps} steps at sample rate {rate:.4g}",
        *_claimed_epsilon(scores, target),
        bound.epsilon,
        "at most",
        confidence,
        note=f"noise multiplier at most {bound.noise_multiplier:.4g} (claimed {claim.noise_multiplier:.4g})",
        details={
            "noise_multiplier_at_most": bound.noise_multiplier,
            "epsilon_without_assumptions": bound.direct_epsilon,
            "false_positives": bound.false_positives,
            "false_negatives": bound.false_negatives,
            "scores_of_each_kind": bound.trials,
        },
    )


def check_one_run(scores: RunScores, target: Target, confidence: float) -> Verdict:
    """Judges a run by how many of its canaries can be guessed right."""
    claim, (canaries, steps) = target.claim, scores.values.shape
    totals = log_likelihood_ratio(scores.values, claim.noise_multiplier, scores.sample_rate)
    tries = sorted({max(1, canaries // share) for share in (20, 5, 2)})
    bound = bound_from_guesses(totals, scores.included, guesses=tries, delta=claim.delta, confidence=confidence)
    return Verdict(
        "canaries, one run",
        f"{canaries} canaries, {bound.correct} of {bound.guesses} guesses right; {steps} steps",
        *_claimed_epsilon(scores, target),
        bound.epsilon,
        "at most",
        confidence,
        note="assumes nothing of noise or sampling",
        details={"guesses_tried": tries, "guesses": bound.guesses, "correct": bound.correct},
    )


def _claimed_epsilon(scores: RunScores, target: Target) -> tuple[str, float]:
    """Returns what the steps that were scored spend together if the claim holds, and its name in the report."""
    claim, steps = target.claim, scores.values.shape[1]
    name = "epsilon of the run" if steps == claim.steps else f"epsilon of {steps} steps"
    return name, accounting.epsilon(claim.noise_multiplier, scores.sample_rate, steps, claim.delta)
