"""The canary audit: how well releases tell whether a record was there, against how well they may.

A canary is a record whose clipped gradient is one coordinate: a Dirac in the spectrum, or on one weight. Its score is
the release along that coordinate. Canaries on different coordinates do not disturb each other, and under the claim (and
add-or-remove-one) their noise is independent, so one release gives many independent scores. Mistakes hide in special
coordinates, so scores are judged all together, by class of coordinate, and by layer, every look at a confidence that
is corrected for the others.

Three statements are tested:

    one step     those in the batch are protected by the Gaussian mechanism of the claimed multiplier
    many steps   those in the data set by the Poisson-sampled Gaussian, composed over the steps
    one run      the same run is (ε, δ)-DP, whatever its noise or sampling (Steinke et al. 2023)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from spectral_dp import accounting
from spectral_dp.audit.noise_map import NoiseMap
from spectral_dp.audit.report import Verdict, timed
from spectral_dp.audit.statistics.bounds import LowerBound, corrected, gaussian_lower_bound
from spectral_dp.audit.statistics.one_run import one_run
from spectral_dp.audit.statistics.sampled import log_likelihood_ratio, sampled_lower_bound
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import LONG, Block, Kind, Record, Target

#: Canaries whose noise is correlated more than this: one of them is left out.
ORTHOGONAL = 1e-3

#: Fewer scores of a class than this are not judged by themselves.
FEWEST_SCORES = 24


class Canary(NamedTuple):
    """A record made to be noticed; where; and how far it moves the release there, alone."""

    layer: str
    kind: Kind
    record: Record
    opposite: Record
    support: Tensor
    weights: Tensor
    length: float = 0.0


@dataclass(frozen=True, eq=False)
class Flock:
    """Canaries that can be in one batch without disturbing each other.

    Attributes:
        canaries: The canaries.
        directions: ``(m, d)``, sparse: the unit vector along which each is looked for.
    """

    canaries: tuple[Canary, ...]
    directions: sparse.csr_matrix

    def scores(self, release: Tensor) -> NDArray[np.float64]:
        """The release along every canary's direction, ``(m,)``."""
        return np.asarray(self.directions @ release.numpy())


@dataclass(frozen=True, eq=False)
class CanaryScores:
    """Scores of one step, in deviations of the claimed noise, with the layer and class of each."""

    values: NDArray[np.float64]
    included: NDArray[np.bool_]
    layers: NDArray[np.str_]
    kinds: NDArray[np.str_]

    @classmethod
    def pooled(cls, parts: Iterable[CanaryScores]) -> CanaryScores:
        """Scores of several flocks together."""
        parts = list(parts)
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    def groups(self) -> dict[str, NDArray[np.bool_]]:
        """All scores; those of each class; those of each layer. Classes with too few scores are not listed."""
        masks = {"all": np.ones(len(self.values), dtype=bool)}
        masks |= {f"class {k}": self.kinds == k for k in np.unique(self.kinds)}
        masks |= {f"layer {n}": self.layers == n for n in np.unique(self.layers)}
        fewest = {name: min(self.included[m].sum(), (~self.included[m]).sum()) for name, m in masks.items()}
        return {name: mask for name, mask in masks.items() if fewest[name] >= FEWEST_SCORES}


def flocks(
    target: Target, blocks: Sequence[Block], per_block: int, generator: torch.Generator, noise: NoiseMap | None = None
) -> list[Flock]:
    """Chooses canaries: in every block the special coordinates and some others, at most ``per_block``.

    Where a canary is to be looked for is seen, not assumed: by releasing it with the noise off. Of those whose noise is
    correlated by the noise map (a crop does that) only one is kept, since scores must be independent.
    """
    chosen: list[list[Canary]] = []
    for members in _apart(blocks):
        canaries: list[Canary] = []
        picks = {id(block): _special_first(block, per_block, generator) for block in members}
        for turn in range(per_block):
            now = [(block, picks[id(block)][turn]) for block in members if turn < len(picks[id(block)])]
            canaries += _seen(target, now)
        chosen.append(canaries)
    made = [_flock(target, canaries, noise) for canaries in chosen]
    return [flock for flock in made if flock.canaries]


def one_step_scores(target: Target, flock: Flock, rounds: int, coins: np.random.Generator) -> CanaryScores:
    """Releases batches in which every canary takes part by a fair coin; for replace-one, it or its opposite does."""
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
    return CanaryScores(np.concatenate(values), np.concatenate(included), layers, kinds)


def one_step(scores: CanaryScores, target: Target, confidence: float, seconds: float) -> Verdict:
    """Judges scores of single steps by the trade-off of the Gaussian mechanism."""
    claim = target.claim
    with timed() as watch:
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
        audit="canaries, one step",
        tested=f"{len(scores.values)} scores, {len(groups)} looks",
        quantity="epsilon of one step",
        claimed=claim.step_epsilon,
        measured=bound.epsilon,
        wanted="at most",
        confidence=confidence,
        ok=bound.epsilon <= claim.step_epsilon,
        seconds=seconds + watch.seconds,
        note=f"most telling: {worst}, mu at least {bound.mu:.4g} (claimed {1 / claim.noise_multiplier:.4g})",
        details={
            name: {"mu": b.mu, "epsilon": b.epsilon, "scores_of_each_kind": b.trials} for name, b in bounds.items()
        },
    )


@dataclass(frozen=True, eq=False)
class RunScores:
    """Scores of a training run: per canary and step ``(m, T)``, in units of the clipping bound; who was in the data."""

    values: NDArray[np.float64]
    included: NDArray[np.bool_]
    sample_rate: float


def run_scores(target: Target, flock: Flock, steps: int, runs: int, coins: np.random.Generator) -> RunScores:
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


def many_steps(scores: RunScores, target: Target, confidence: float, seconds: float) -> Verdict:
    """Judges a run by the likelihood ratio of the sampled Gaussian, through the accountant's privacy loss."""
    claim, steps, rate = target.claim, scores.values.shape[1], scores.sample_rate
    if min(scores.included.sum(), (~scores.included).sum()) < 2:
        return Verdict.left_out("canaries, many steps", f"{len(scores.included)} canaries are too few to judge")
    with timed() as watch:
        claimed = accounting.epsilon(claim.noise_multiplier, rate, steps, claim.delta)
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
        audit="canaries, many steps",
        tested=f"{len(scores.included)} canaries, {steps} steps at sample rate {rate:.4g}",
        quantity=_epsilon_of(steps, target),
        claimed=claimed,
        measured=bound.epsilon,
        wanted="at most",
        confidence=confidence,
        ok=bound.epsilon <= claimed,
        seconds=seconds + watch.seconds,
        note=f"noise multiplier at most {bound.noise_multiplier:.4g} (claimed {claim.noise_multiplier:.4g})",
        details={
            "noise_multiplier_at_most": bound.noise_multiplier,
            "epsilon_without_assumptions": bound.direct_epsilon,
            "false_positives": bound.false_positives,
            "false_negatives": bound.false_negatives,
            "scores_of_each_kind": bound.trials,
        },
    )


def single_run(scores: RunScores, target: Target, confidence: float) -> Verdict:
    """Judges a run by how many of its canaries can be guessed right."""
    claim, (canaries, steps), rate = target.claim, scores.values.shape, scores.sample_rate
    with timed() as watch:
        totals = log_likelihood_ratio(scores.values, claim.noise_multiplier, rate)
        tries = sorted({max(1, canaries // share) for share in (20, 5, 2)})
        bound = one_run(totals, scores.included, guesses=tries, delta=claim.delta, confidence=confidence)
        claimed = accounting.epsilon(claim.noise_multiplier, rate, steps, claim.delta)
    return Verdict(
        audit="canaries, one run",
        tested=f"{canaries} canaries, {bound.correct} of {bound.guesses} guesses right; {steps} steps",
        quantity=_epsilon_of(steps, target),
        claimed=claimed,
        measured=bound.epsilon,
        wanted="at most",
        confidence=confidence,
        ok=bound.epsilon <= claimed,
        seconds=watch.seconds,
        note="assumes nothing of noise or sampling",
        details={"guesses_tried": tries, "guesses": bound.guesses, "correct": bound.correct},
    )


def _epsilon_of(steps: int, target: Target) -> str:
    return "epsilon of the run" if steps == target.claim.steps else f"epsilon of {steps} steps"


def _apart(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks in groups that have no number of the release in common."""
    groups: list[tuple[set[int], list[Block]]] = []
    for block in blocks:
        support = set(block.support.tolist())
        for taken, members in groups:
            if taken.isdisjoint(support):
                taken |= support
                members.append(block)
                break
        else:
            groups.append((support, [block]))
    return [members for _, members in groups]


def _special_first(block: Block, most: int, generator: torch.Generator) -> list[int]:
    """Directions of a block: special ones first, then others at random."""
    shuffled = torch.randperm(len(block.kinds), generator=generator).tolist()
    return sorted(shuffled, key=lambda i: block.kinds[i] is Kind.INTERIOR)[:most]


def _seen(target: Target, chosen: list[tuple[Block, int]]) -> list[Canary]:
    """Canaries in different blocks, with the direction in which each is seen to move the release."""
    length = LONG * max(1.0, target.claim.max_grad_norm)
    units = [torch.eye(len(block.labels))[i] for block, i in chosen]
    records = [block.record(unit, length) for (block, _), unit in zip(chosen, units, strict=True)]
    opposites = [block.record(-unit, length) for (block, _), unit in zip(chosen, units, strict=True)]
    shift = target.release(records, Script())
    canaries = []
    for (block, i), record, opposite in zip(chosen, records, opposites, strict=True):
        # Noise that cannot be switched off would hide it; a function's coordinates are those of its gradients.
        weights = shift[block.support] if target.controls_noise else target.claim.max_grad_norm * block.basis[i]
        canaries.append(Canary(block.layer, block.kinds[i], record, opposite, block.support, weights))
    return canaries


def _flock(target: Target, canaries: list[Canary], noise: NoiseMap | None) -> Flock:
    """Leaves out canaries that are filtered away, and those that would share their noise with another."""
    least = 0.05 * target.claim.max_grad_norm
    in_block: dict[int, list[Canary]] = {}
    for canary in canaries:
        if (length := float(canary.weights.norm())) > least:
            unit = canary._replace(weights=canary.weights / length, length=length)
            in_block.setdefault(int(canary.support[0]), []).append(unit)
    kept = [canary for members in in_block.values() for canary in _independent(members, noise)]
    rows = np.repeat(np.arange(len(kept)), [len(c.support) for c in kept])
    columns = torch.cat([c.support for c in kept]).numpy() if kept else rows
    values = torch.cat([c.weights for c in kept]).numpy() if kept else rows
    matrix = sparse.csr_matrix((values, (rows, columns)), shape=(len(kept), target.size))
    matrix.eliminate_zeros()
    return Flock(tuple(kept), matrix)


def _independent(members: list[Canary], noise: NoiseMap | None) -> list[Canary]:
    """Of canaries in one block, as many as have uncorrelated noise; white noise where its map is not known."""
    weights = torch.stack([canary.weights for canary in members])  # (m, n)
    used = (weights.abs().amax(0) > 1e-6).nonzero().flatten()
    weights = weights[:, used]
    sigma = torch.eye(len(used)).double() if noise is None else noise.covariance(members[0].support[used])
    covariance = weights @ sigma @ weights.T
    deviations = covariance.diagonal().clamp(min=1e-30).sqrt()
    correlation = (covariance / deviations / deviations[:, None]).abs()
    chosen: list[int] = []
    for i in range(len(members)):
        if all(float(correlation[i, j]) < ORTHOGONAL for j in chosen):
            chosen.append(i)
    return [members[i] for i in chosen]
