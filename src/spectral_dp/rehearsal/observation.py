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

#: What is added up over the samples of a batch: the gradients as recorded, as the loss being a sum says; times the
#: number of samples, as its being a mean says; or their directions, of which each has length one.
Sum = Literal["sum", "mean", "direction"]
KINDS: tuple[Sum, ...] = ("sum", "mean", "direction")


@dataclass(frozen=True)
class Observation:
    """The sketched sums of one batch.

    Attributes:
        sums: For each kind of sum, ``(L, K)``: one row a block.
        mean_norm: Average length of the gradients as recorded, over all blocks.
        samples: How many there were.
        precision: The unit of the coarsest arithmetic in which gradients arrived.
    """

    sums: Mapping[Sum, Tensor]
    mean_norm: float
    samples: int
    precision: float


def observe(gradients: ModelGradients, batches: Sequence[RecordedBatch]) -> Observation:
    """Sums up what the backward passes over one batch recorded."""
    blocks = [parameters for _, parameters in gradients.trained_blocks]
    totals = {kind: torch.zeros(len(blocks), _PLACES, dtype=torch.float64) for kind in KINDS}
    norms: list[Tensor] = []
    for batch in batches:
        lengths = batch.squared_norms().sum(0).sqrt()
        usable = lengths.isfinite() & (lengths > 0)
        as_recorded = _sketch(blocks, batch.clipped_sums(usable.double()))
        totals["sum"] += as_recorded
        totals["mean"] += batch.size * as_recorded
        inverse = torch.where(usable, 1 / lengths.where(usable, torch.ones_like(lengths)), 0.0)
        totals["direction"] += _sketch(blocks, batch.clipped_sums(inverse))
        norms.append(lengths[usable])
    lengths = torch.cat(norms) if norms else torch.zeros(0)
    precision = max((batch.precision for batch in batches), default=0.0)
    return Observation(totals, float(lengths.mean()) if len(lengths) else 0.0, sum(b.size for b in batches), precision)


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
