"""What a block of a target does to a record, and the noise on it, as matrices."""

from typing import NamedTuple

import torch
from torch import Tensor

from spectral_dp import audit
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import LONG


class BlockMap(NamedTuple):
    """What a block does to a record, and the noise on it.

    Attributes:
        A: ``(n, k)``: what comes out, at the block's support, of a gradient of length ``C`` along each of its
            directions, over ``C``; after the clip, with the noise off.
        Sigma: ``(n, n)``: covariance of the noise there.
    """

    A: Tensor
    Sigma: Tensor


def find_block_map(target: audit.Target, noise: audit.NoiseMap, block: audit.Block, *, batch: int = 3) -> BlockMap:
    """Finds both through the target's real step, in batches of which all records but one contribute nothing."""
    bound, others = target.claim.max_grad_norm, [target.null()] * (batch - 1)
    origin = target.release([target.null(), *others], Script())
    records = [block.record(e, LONG * max(1.0, bound)) for e in torch.eye(len(block.labels))]
    shifts = [target.release([record, *others], Script()) - origin for record in records]
    columns = [shift[block.support] for shift in shifts]
    return BlockMap(torch.stack(columns, 1) / bound, noise.covariance(block.support))
