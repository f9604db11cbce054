"""The neighbour audit: with the noise off, one record more, however hostile, moves the release by at most the bound.

Batches of several sizes, of ordinary records; to each one more record is added. The movement is compared with the
sensitivity that is claimed. A record that contributes nothing must move nothing at all, whatever else is in the batch:
a divisor that depends on the batch is caught by that. Records that are NaN or infinite are judged by themselves,
because not every library claims to bound them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spectral_dp.audit.noise_control import Script
from spectral_dp.audit.report import Verdict, timed
from spectral_dp.audit.target import Record, Target

#: Sizes of the batches that a record is added to.
SIZES = (0, 1, 2, 5, 20)

#: Slack for float32, relative to the bound.
SLACK = 1e-3


def neighbours(target: Target, generator: torch.Generator) -> list[Verdict]:
    """Measures how far one record can move the release."""
    bound = target.claim.max_grad_norm * target.largest_gain
    hostile = target.hostile(generator)
    finite = {h.name: h.record for h in hostile if h.finite}
    not_finite = {h.name: h.record for h in hostile if not h.finite}
    size_verdict = _batch_size(target, bound, generator)
    verdicts = [_movement(target, "neighbours", finite, bound, generator), size_verdict]
    if not_finite:
        verdict = _movement(target, "neighbours, not finite", not_finite, bound, generator)
        if not target.handles_non_finite and verdict.ok is False:
            verdict = Verdict.left_out(
                verdict.audit, f"{target.name} does not claim to bound such records, and does not: {verdict.note}"
            )
        verdicts.append(verdict)
    return verdicts


def _movement(
    target: Target, audit: str, records: dict[str, Record], bound: float, generator: torch.Generator
) -> Verdict:
    with timed() as watch:
        most, by = 0.0, ""
        for batch in _batches(target, generator):
            before = target.release(batch, Script())
            for name, record in records.items():
                moved = _length(target.release([*batch, record], Script()) - before)
                if moved > most or not by:
                    most, by = moved, f"'{name}' in a batch of {len(batch)}"
    return Verdict(
        audit=audit,
        tested=f"{len(records)} hostile records, batches of {', '.join(map(str, SIZES))}",
        quantity="movement / sensitivity",
        claimed=1.0,
        measured=most / bound,
        wanted="at most",
        confidence=None,
        ok=most <= bound * (1 + SLACK),
        seconds=watch.seconds,
        note=f"largest by {by}",
        details={"records": list(records), "batch_sizes": list(SIZES), "sensitivity": bound},
    )


def _batch_size(target: Target, bound: float, generator: torch.Generator) -> Verdict:
    """What the mere presence of a record changes: nothing, in the signal and in the noise."""
    with timed() as watch:
        signal, at = 0.0, 0
        for batch in _batches(target, generator):
            moved = _length(target.release([*batch, target.null()], Script()) - target.release(batch, Script()))
            if moved / bound > signal:
                signal, at = moved / bound, len(batch)
        noise, noise_at = _change_of_noise(target, generator)
    parts = {"signal": (signal, at), "noise": (noise, noise_at)}
    worst = max(parts, key=lambda name: parts[name][0])
    most, size = parts[worst]
    return Verdict(
        audit="batch size",
        tested=f"a record that contributes nothing, batches of {', '.join(map(str, SIZES))}",
        quantity="relative change",
        claimed=0.0,
        measured=most,
        wanted="at most",
        confidence=None,
        ok=most <= SLACK,
        seconds=watch.seconds,
        note=f"largest in the {worst}, in a batch of {size}" if most > SLACK else "",
        details={"change_of_signal": signal, "change_of_noise": noise},
    )


def _change_of_noise(target: Target, generator: torch.Generator) -> tuple[float, int]:
    """How much the noise that given draws make depends on the batch; the same draws for every size."""
    dry = Script()
    target.release([target.null()] * max(SIZES), dry)
    draws = torch.randn(dry.drawn, generator=generator)
    noises = {size: target.release([target.null()] * size, Script(draws)) for size in SIZES}
    reference = noises[max(SIZES)]
    length = max(float(reference.norm()), 1e-300)
    changes = {size: _length(noise - reference) / length for size, noise in noises.items()}
    largest = max(changes, key=lambda size: changes[size])
    return changes[largest], largest


def _batches(target: Target, generator: torch.Generator) -> list[list[Record]]:
    return [target.ordinary(size, generator) for size in SIZES]


def _length(movement: Tensor) -> float:
    """Its norm; infinite where the release is no longer finite, which gives the record away."""
    return float(movement.norm()) if bool(movement.isfinite().all()) else math.inf
