"""The every-call audit: whether each single release of a run has fresh noise of the claimed size.

The noise-law audit pools many numbers of a few releases. One release without noise among a thousand does not show
there. Here every call is judged by itself:

1. A run, with batches and step numbers of its own, trains on records that all move the release in the same direction.
2. That direction is taken out of every release, parameter by parameter. What remains is noise alone, whatever the batch
   was.
3. This noise is tested call by call (``statistics/call_law.py``).

A call that was looked at and had no noise is found. Nothing is known of calls that were not looked at, so the report
states which were: see :class:`~spectral_dp.audit.statistics.coverage.Coverage`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from spectral_dp.audit.instruments.noise_map import NoiseMap, standardise_noise
from spectral_dp.audit.report import Verdict
from spectral_dp.audit.statistics.call_law import TAILS, CallNoise, judge_calls
from spectral_dp.audit.statistics.coverage import Coverage
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import LONG, Output, Record, Target

#: Records in a batch of the run, about, so that some are empty; and the most in its data set.
BATCH, MOST_RECORDS = 1, 1 << 14

#: Numbers that are kept of a target's first calls, all together.
MOST_KEPT = 1 << 26

#: Numbers of every call that are kept to compare calls with each other; shared among the parameters.
COMPARED = 256


def check_every_call(
    target: Target,
    noise: NoiseMap | None,
    steps: int,
    calls: int,
    confidence: float,
    generator: torch.Generator,
    first: Sequence[Tensor] = (),
) -> tuple[Verdict, Coverage]:
    """Tests the noise of every step of a run, or of several runs where one is short.

    Args:
        target: The target to audit.
        noise: The noise map of the target. None where its noise cannot be controlled.
        steps: How many steps of the run to look at, at most.
        calls: How many releases to look at, at least.
        confidence: Probability with which noise as claimed must pass, all calls together.
        generator: Chooses the direction that the records share.
        first: The very first releases that were asked of the target, from :func:`first_calls`.

    Returns:
        The verdict, and which calls were looked at.
    """
    claim, length = target.claim, _length(target, steps, calls)
    runs = math.ceil(calls / length)
    record, clean = _one_direction(target, noise, generator)
    records = [record] * min(math.ceil(BATCH / claim.sample_rate), MOST_RECORDS)
    releases: Iterator[Tensor] = itertools.chain.from_iterable(
        target.run(records, length).releases for _ in range(runs)
    )
    releases = itertools.chain((release.double() for release in first), releases)
    silence = CallNoise.NEARLY_ZERO * claim.noise_std
    seen, finite = _looked_at(releases, clean, target.outputs, silence)
    known = length if target.starts_afresh else len(first)
    coverage = Coverage(len(seen.energies), known, claim.steps)
    moving = len(target.outputs) - sum(_steady(target.outputs))
    if not finite or not (seen.widths.sum() or moving):
        p_values = {"any": 0.0}
        note = "there is no noise" if finite else "the noise of a call is not finite"
    else:
        law = judge_calls(seen, confidence=confidence)
        p_values, note = law.p_values, "" if law.ok else law.verdict
        if law.ok and moving:
            note = f"filters of {moving} parameters change with the step: only that they have noise was looked at"
    tested = f"{coverage.calls} calls of {len(seen.widths)} parameters, steps 1 to {known} of {claim.steps}"
    tested += f", {runs} times" if runs > 1 else ""
    p, details = min(p_values.values()), {"p_values": p_values, "coverage": coverage.to_json()}
    claimed = ("p-value of the claimed noise", 1 - confidence)
    return Verdict(
        "noise, every call", tested, *claimed, p, "at least", confidence, note=note, details=details
    ), coverage


def first_calls(target: Target, steps: int, calls: int) -> list[Tensor]:
    """Makes the very first releases of a target, of records that contribute nothing. Must be called before all else.

    A target that starts every run afresh is asked for one release. A target that keeps its state makes its first steps
    now or never: it is asked for as many as :func:`check_every_call` looks at, or as can be kept.
    """
    if target.starts_afresh:
        return [target.release([target.null()] * 2)]
    records = [target.null()] * min(math.ceil(BATCH / target.claim.sample_rate), MOST_RECORDS)
    length = max(1, min(_length(target, steps, calls), MOST_KEPT // target.size))
    return [release.float() for release in target.run(records, length).releases]


def _length(target: Target, steps: int, calls: int) -> int:
    """How many steps of the run are looked at."""
    return min(target.claim.steps, max(steps, calls))


def _one_direction(
    target: Target, noise: NoiseMap | None, generator: torch.Generator
) -> tuple[Record, Callable[[Tensor], list[Tensor]]]:
    """A record, and what takes its direction out of a release: the noise of every parameter is left, standardised.

    Where the noise cannot be switched off the direction is not known; then the record contributes nothing.
    """
    kept = None if noise is not None else _ever_noised(target)

    def parts(release: Tensor) -> list[Tensor]:
        found = standardise_noise(release, noise, target.outputs)
        return found if kept is None else [z[k] for z, k in zip(found, kept, strict=True)]

    if not target.controls_noise:
        return target.null(), parts
    record = target.mates(generator)[0]
    axes = parts(target.release([record], Script()) - target.release([], Script()))
    least = 1e-6 / LONG * max(float(axis.norm()) for axis in axes)
    return record, lambda release: [_without(z, g, least) for z, g in zip(parts(release), axes, strict=True)]


def _ever_noised(target: Target) -> list[Tensor]:
    """Which numbers of every parameter had noise in any of three releases; a filter may drop the others."""
    noises = torch.stack([target.release([target.null()] * 2) for _ in range(3)])
    sizes = [output.size for output in target.outputs]
    return list((noises.abs().amax(0) > 0).split(sizes))


def _without(z: Tensor, axis: Tensor, least: float) -> Tensor:
    """The other coordinates of ``z`` after a reflection that makes ``axis`` the first one; all where it is zero.

    Independent standard normals stay so under a reflection.
    """
    length = float(axis.norm())
    if length <= least:
        return z
    mirror = axis / length
    at = int(mirror.abs().argmax())  # the first coordinate is the largest one: a record on one number mixes no others
    sign = 1.0 if float(mirror[at]) > 0 else -1.0
    mirror = mirror.clone()
    mirror[at] += sign
    reflected = z - mirror * (2 * (mirror @ z) / (mirror @ mirror))
    return torch.cat([reflected[:at], reflected[at + 1 :]])


def _looked_at(
    releases: Iterator[Tensor], clean: Callable[[Tensor], list[Tensor]], outputs: Sequence[Output], silence: float
) -> tuple[CallNoise, bool]:
    """What is kept of every call; and whether all its numbers were finite."""
    sizes, steady = [output.size for output in outputs], _steady(outputs)
    share = max(COMPARED // len(outputs), 1)
    energies, zeros, silent, compared, widths, finite = [], [], [], [], list[int](), True
    beyond = np.zeros(len(TAILS), dtype=np.int64)
    for release in releases:
        found = clean(release)
        known = steady if len(found) == len(steady) else [all(steady)] * len(found)  # one map may be of all parameters
        parts = [z for z, keep in zip(found, known, strict=True) if keep]
        widths = [len(z) for z in parts]
        finite = finite and bool(release.isfinite().all())
        for z in parts:
            beyond += _beyond(z)
        energies.append([float(z.square().sum()) for z in parts])
        zeros.append(sum(int((z.abs() < CallNoise.NEARLY_ZERO).sum()) for z in parts))
        compared.append(torch.cat([z[:share] for z in parts] or [release[:0]]).float().numpy())
        moving = [numbers for numbers, keep in zip(release.split(sizes), steady, strict=True) if not keep]
        silent.append(any(float(numbers.abs().max()) < silence for numbers in moving))
    noise = CallNoise(
        energies=np.array(energies),
        zeros=np.array(zeros),
        silent=np.array(silent),
        widths=np.array(widths, dtype=np.int64),
        compared=np.stack(compared),
        beyond=beyond,
        shares=np.minimum(widths, share).astype(np.int64),
    )
    return noise, finite


def _beyond(z: Tensor) -> list[int]:
    """How many numbers are larger than each of ``TAILS``; of those that are, few are left to look at again."""
    rest, counts = z.abs(), list[int]()
    for size in TAILS:
        rest = rest[rest > size]
        counts.append(len(rest))
    return counts


def _steady(outputs: Sequence[Output]) -> list[bool]:
    return [output.is_steady for output in outputs]
