"""What one batch of a rehearsal showed: the sums that would have been released of it, in a few numbers.

Sums of per-sample gradients are as large as the model. Their *sketch* is ``K`` numbers a block: every coordinate times
a random sign, added up in turn into one of ``K`` places. It is linear, so sketches of sums add like the sums, and
its expected squared length is that of the vector (Charikar, Chen & Farach-Colton 2002).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from spectral_dp.gradients.model import ModelGradients, RecordedBatch

_PLACES = 32

#: Gradients shorter than this part of the longest count for less than a direction: they may be nothing but rounding, as
#: those of samples that a trained model is sure of.
_FLOOR = 1e-3

#: What is added up over the samples of a batch: the gradients as recorded, as the loss being a sum says; times the
#: number of samples, as its being a mean says; or their directions, of which each has a length of nearly one.
Sum = Literal["sum", "mean", "direction"]
KINDS: tuple[Sum, ...] = ("sum", "mean", "direction")


@dataclass(frozen=True)
class Observation:
    """The sketched sums of one batch.

    Attributes:
        sums: For each kind of sum, ``(L, K)``: one row a block.
        mean_norm: Average length of the gradients as recorded, over all blocks.
        samples: How many there were.
        floor: Added to the length of a gradient before it is divided by it.
        precision: The unit of the coarsest arithmetic in which gradients arrived.
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
    """Sums up what the backward passes over one batch recorded.

    Args:
        gradients: Of the model.
        batches: What each backward pass recorded.
        reduction: How the loss is said to combine samples.
        floor: That of an earlier observation, to compare with it; where None, it is set by this one.
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
    """How far sums are from ``sum(plus) = sum(minus)``, relative to the longest of them, over all blocks together.

    Not block by block: some hold nothing but rounding (a bias before a normalisation layer).
    """
    difference = sum(o.sums[kind] for o in plus) - sum(o.sums[kind] for o in minus)
    assert isinstance(difference, Tensor)
    scale = max(float(o.sums[kind].norm()) for o in (*plus, *minus))
    return float(difference.norm()) / scale if scale else 0.0


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
