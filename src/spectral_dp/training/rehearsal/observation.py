"""Describes one batch of a rehearsal by a few numbers: sketches of the sums that would have been released.

A sum of per-sample gradients is as large as the model. Its *sketch* has only ``K`` numbers per block: each coordinate
is multiplied by a random sign and added to one of ``K`` places in turn. The sketch is linear, so sketches add like the
sums, and its expected squared length is that of the vector (Charikar, Chen & Farach-Colton 2002).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

from spectral_dp.gradients.model import ModelGradients, RecordedBatch

_PLACES = 32

#: Gradients shorter than this fraction of the longest one count for less than a direction. They may consist of rounding
#: errors only, such as those of samples that a trained model classifies with certainty.
_FLOOR = 1e-3

#: What is summed over the samples of a batch. "sum": the gradients as recorded, which is right if the loss is a sum.
#: "mean": the gradients times the number of samples, right if it is a mean. "direction": vectors of length nearly one.
Sum = Literal["sum", "mean", "direction"]
KINDS: tuple[Sum, ...] = ("sum", "mean", "direction")


@dataclass(frozen=True)
class Observation:
    """The sketched sums of one batch.

    Attributes:
        sums: The sketches ``(L, K)`` of each kind of sum, with one row per block.
        mean_norm: The average length of the gradients as recorded, over all blocks.
        samples: The number of samples.
        floor: The number that is added to the length of a gradient before the gradient is divided by it.
        precision: The machine epsilon of the coarsest arithmetic in which gradients arrived.
    """

    sums: Mapping[Sum, Tensor]
    mean_norm: float
    samples: int
    floor: float
    precision: float


def observe(
    gradients: ModelGradients,
    batches: Sequence[RecordedBatch],
    reduction: Literal["sum", "mean"],
    floor: float | None = None,
) -> Observation:
    """Returns the sketched sums of what the backward passes over one batch recorded.

    Args:
        gradients: The recorder of the model's per-sample gradients.
        batches: What each backward pass recorded.
        reduction: The announced reduction of the loss.
        floor: The ``floor`` of an earlier observation that this one is compared with; None for the first one.
    """
    blocks = [parameters for _, parameters in gradients.trained_blocks]
    totals = {kind: torch.zeros(len(blocks), _PLACES, dtype=torch.float64) for kind in KINDS}
    lengths = [batch.squared_norms().sum(0).sqrt() for batch in batches]
    usable = [v.isfinite() & (v > 0) for v in lengths]
    recorded = torch.cat([v[u] for v, u in zip(lengths, usable, strict=True)]) if batches else torch.zeros(0)
    scales = [batch.size if reduction == "mean" else 1 for batch in batches]
    if floor is None:
        floor = _FLOOR * max(
            (float(v[u].max()) * n for v, u, n in zip(lengths, usable, scales, strict=True) if u.any()), default=0.0
        )
    for batch, length, is_usable, scale in zip(batches, lengths, usable, scales, strict=True):
        as_recorded = _sketch(blocks, batch.clipped_sums(is_usable.double()))
        totals["sum"] += as_recorded
        totals["mean"] += batch.size * as_recorded
        inverse = scale / (length * scale + floor).where(is_usable, torch.ones_like(length))
        totals["direction"] += _sketch(blocks, batch.clipped_sums(inverse * is_usable))
    mean_norm = float(recorded.mean()) if len(recorded) else 0.0
    precision = max((batch.precision for batch in batches), default=0.0)
    return Observation(totals, mean_norm, sum(batch.size for batch in batches), floor, precision)


def mismatch(kind: Sum, plus: Sequence[Observation], minus: Sequence[Observation]) -> float:
    """Returns ``|sum(plus) - sum(minus)|``, relative to the longest of these sums, over all blocks together.

    It is not taken block by block, because some blocks hold rounding errors only (a bias before a normalisation layer).
    """
    difference = sum(o.sums[kind] for o in plus) - sum(o.sums[kind] for o in minus)
    assert isinstance(difference, Tensor)
    scale = max(float(o.sums[kind].norm()) for o in (*plus, *minus))
    return float(difference.norm()) / scale if scale else 0.0


def has_other_scale(passes: Sequence[Observation], announced: Literal["sum", "mean"], small: int) -> bool:
    """Returns whether the lengths of gradients in large and small batches contradict the announced reduction.

    Args:
        passes: Observations of batches of both sizes.
        announced: The announced reduction of the loss. A mean makes gradients shorter as batches grow; a sum does not.
        small: The largest size of a small batch.
    """
    seen = [o for o in passes if o.mean_norm > 0]
    large, few = ([o for o in seen if (o.samples > small) is is_large] for is_large in (True, False))
    if not (large and few):
        return False
    size, length = (_mean_log(large, of) - _mean_log(few, of) for of in ("samples", "mean_norm"))
    as_if_wrong = length / size + 1 if announced == "mean" else -length / size
    return as_if_wrong > 2 / 3


def _mean_log(passes: Sequence[Observation], attribute: str) -> float:
    return fmean(math.log(getattr(o, attribute)) for o in passes)


def _sketch(blocks: Sequence[Sequence[nn.Parameter]], sums: Mapping[nn.Parameter, Tensor]) -> Tensor:
    sketch = torch.zeros(len(blocks), _PLACES, dtype=torch.float64)
    for row, block in enumerate(blocks):
        for parameter in block:
            values = sums[parameter].flatten()
            generator = torch.Generator(device=values.device).manual_seed(len(values))
            signs = torch.empty(len(values), dtype=torch.int8, device=values.device).random_(0, 2, generator=generator)
            signed = nn.functional.pad(values * (2 * signs - 1), (0, -len(values) % _PLACES))
            sketch[row] += signed.view(-1, _PLACES).sum(0, dtype=torch.float64).cpu()
    return sketch
