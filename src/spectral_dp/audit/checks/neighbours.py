"""The neighbour audit: with the noise off, one record more, however hostile, moves the release by at most the bound.

One more record is added to batches of many sizes: first, in the middle or last. The movement is compared with the
claimed sensitivity. Code may do something else for large batches (split them, cut them off, divide by what came), so
sizes go beyond what Poisson sampling reaches (:func:`large_sizes`). Records that are NaN or infinite have a line of
their own, because not every library claims to bound them.

The batch-size audit uses the same batches and asks more: how many records there are, and what they are, must not matter
at all.

* A record that contributes nothing moves nothing.
* Many records give the sum of what each gives alone. What changes *between* the sizes that are tried shows here.
* The same draws give the same noise, whatever the batch.
* The same records give the same sum again, whatever was released between. A model that carries something from one batch
  to the next shows here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_dp.audit.report import Verdict
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import Record, Target

#: Sizes of the batches of ordinary records to which every hostile record is added.
SMALL = (0, 1, 2, 5, 20)

#: The largest batch is at least this, however small the expected one: code has thresholds of its own.
LEAST_LARGEST = 128

#: Hostile records tried in each large batch, by turns, unless the audit is thorough.
BY_TURNS = 2

#: Slack for float32, relative to the bound.
SLACK = 1e-3

#: Two ways to add up n records, in batches of different sizes, differ by at most this times their rounding.
ROUNDINGS = 8

#: A sum of n records is rounded to about this share of n bounds, in another way with every split into physical batches.
ROUNDING = 2.0**-21


class Batch(NamedTuple):
    """A batch, and what happened when it was released with the noise off.

    Attributes:
        records: The records.
        release: What came out.
        drawn: How many numbers were drawn for the noise.
        large: Whether it is one of the large batches, of records that are cheap to release.
    """

    records: list[Record]
    release: Tensor
    drawn: int
    large: bool


def large_sizes(expected: float) -> list[int]:
    """Returns sizes of large batches: powers of two, around the expected size, twice that, and beyond.

    A Poisson batch exceeds the last of them with a probability below 1e-8: it is at least six deviations above the
    expected size.

    >>> large_sizes(100)
    [32, 64, 99, 100, 101, 128, 160, 200]
    """
    mean = math.ceil(expected)
    reach = mean + math.ceil(6 * math.sqrt(mean))
    largest = max(2 * mean, reach, LEAST_LARGEST)
    powers = [1 << k for k in range(5, largest.bit_length()) if 1 << k <= largest]
    chosen = {*powers, mean - 1, mean, mean + 1, reach, 2 * mean, largest}
    return sorted(size for size in chosen if size not in SMALL)


def check_neighbours(target: Target, generator: torch.Generator, *, thorough: bool = False) -> Iterator[Verdict]:
    """Measures how far one record can move the release.

    Args:
        target: The target to audit.
        generator: Chooses the records.
        thorough: Whether every hostile record is tried at every place of every batch. Otherwise places take turns, and
            in large batches records do.

    Yields:
        The verdict on neighbours, that on the batch size and, if the target can be given any, that on records that are
        not finite.
    """
    bound = target.claim.max_grad_norm * target.largest_gain
    hostile = target.hostile(generator)
    finite = {h.name: h.record for h in hostile if h.finite}
    not_finite = {h.name: h.record for h in hostile if not h.finite}
    mates = target.mates(generator)
    batches = [_batch(target, target.ordinary(size, generator)) for size in SMALL]
    for size in large_sizes(target.claim.expected_batch_size):
        batches.append(_batch(target, list(itertools.islice(itertools.cycle(mates), size)), large=True))
    yield _movement(target, "neighbours", finite, bound, batches, thorough)
    claimed = [h.record for h in hostile if h.finite or target.handles_non_finite]
    yield _batch_size(target, mates, claimed, bound, batches, generator)
    if not_finite:
        verdict = _movement(target, "neighbours, not finite", not_finite, bound, batches, thorough)
        if not target.handles_non_finite and verdict.ok is False:
            reason = f"{target.name} does not claim to bound such records, and does not: {verdict.note}"
            verdict = Verdict.left_out(verdict.audit, reason)
        yield verdict


def _movement(
    target: Target, audit: str, hostile: Mapping[str, Record], bound: float, batches: list[Batch], thorough: bool
) -> Verdict:
    most, by = 0.0, ""
    turns, turn = itertools.cycle(hostile.items()), itertools.count()
    for batch in batches:
        size = len(batch.records)
        places = sorted({0, size // 2, size})  # a batch that is cut off loses another record at each of its ends
        for name, record in hostile.items() if thorough or not batch.large else itertools.islice(turns, BY_TURNS):
            for place in places if thorough else [places[next(turn) % len(places)]]:
                moved = _moved(target, batch, record, place, bound)
                if moved > most or not by:
                    most, by = moved, f"'{name}' at place {place} of a batch of {size}"
    return Verdict(
        audit,
        f"{len(hostile)} hostile records, {_in_words(target, batches)}",
        "movement / sensitivity",
        1.0,
        most / bound,
        "at most",
        slack=SLACK,
        note=f"largest by {by}",
        details={"records": list(hostile), "batch_sizes": _sizes(batches), "sensitivity": bound},
    )


def _batch_size(
    target: Target,
    mates: list[Record],
    hostile: list[Record],
    bound: float,
    batches: list[Batch],
    generator: torch.Generator,
) -> Verdict:
    """What the number of records and their values change beyond their sum: nothing, in the signal and in the noise."""
    largest = max(batches, key=lambda batch: len(batch.records))
    dry = Script()
    target.release([target.null()] * len(largest.records), dry)
    # As many as any batch asks for: a batch that asks for none, where others do, has no noise.
    draws = torch.randn(max(dry.drawn, *(batch.drawn for batch in batches)), generator=generator)
    reference = target.release([target.null()] * 2, Script(draws))
    origin = target.release([], Script())
    alone = [target.release([mate], Script()) - origin for mate in mates]
    hostile_too = [[mates[0], record] for record in hostile]  # one that is not finite, say, must not end the noise
    noises = [target.release(both, Script(draws)) - target.release(both, Script()) for both in hostile_too]
    beside = max(_change(noise, reference, 2 * ROUNDING * bound) for noise in noises)
    found = {"the noise, beside a hostile record": (beside, 2)}
    for batch in batches:
        size = len(batch.records)
        presence = max(_moved(target, batch, target.null(), place, bound) for place in {0, size})
        empty = target.release([target.null()] * size, Script(draws))
        # The signal is subtracted again, in float32: its rounding is no change.
        noise = target.release(batch.records, Script(draws)) - batch.release
        changes = {
            "a record that contributes nothing": presence / bound,
            "the noise, by the number of records": _change(empty, reference),
            "the noise, by their values": _change(noise, reference, ROUNDING * size * bound),
            "the batches before": _length(target.release(batch.records, Script()) - batch.release) / bound,
        }
        if batch.large:  # in another order, too: long and short ones change places
            expected = origin + sum(one * len(batch.records[k :: len(mates)]) for k, one in enumerate(alone))
            turned = target.release([*batch.records[1:], batch.records[0]], Script())
            off = max(_length(release - expected) for release in (batch.release, turned))
            changes["the sum of many records"] = max(0.0, off / bound - ROUNDINGS * ROUNDING * size)
        for name, change in changes.items():
            found[name] = max(found.get(name, (0.0, size)), (change, size))
    worst = max(found, key=lambda name: found[name][0])
    most, size = found[worst]
    return Verdict(
        "batch size",
        f"presence, sum and noise, {_in_words(target, batches)}",
        "change, in bounds or relative",
        0.0,
        most,
        "at most",
        slack=SLACK,
        note=f"largest: {worst}, in a batch of {size}" if most > SLACK else "",
        details={"changes": {name: change for name, (change, _) in found.items()}, "batch_sizes": _sizes(batches)},
    )


def _batch(target: Target, records: list[Record], *, large: bool = False) -> Batch:
    script = Script()
    return Batch(records, target.release(records, script), script.drawn, large)


def _moved(target: Target, batch: Batch, record: Record, place: int, bound: float) -> float:
    """How far a record at this place of the batch moves its release, beyond rounding."""
    records = [*batch.records[:place], record, *batch.records[place:]]
    return max(0.0, _length(target.release(records, Script()) - batch.release) - ROUNDING * len(records) * bound)


def _change(noise: Tensor, reference: Tensor, rounding: float = 0.0) -> float:
    return max(0.0, _length(noise - reference) - rounding) / max(float(reference.norm()), 1e-300)


def _length(movement: Tensor) -> float:
    """Its norm; infinite where the release is no longer finite, which gives the record away."""
    return float(movement.norm()) if bool(movement.isfinite().all()) else math.inf


def _sizes(batches: list[Batch]) -> list[int]:
    return sorted(len(batch.records) for batch in batches)


def _in_words(target: Target, batches: list[Batch]) -> str:
    sizes = _sizes(batches)
    return f"batches of {len(sizes)} sizes up to {sizes[-1]} (expected {target.claim.expected_batch_size:g})"
