"""Canaries: records made to be noticed, many of which fit into one batch without disturbing each other.

A canary is a record whose clipped gradient is one coordinate: a Dirac in the spectrum, or on one weight. Its score is
the release along that coordinate. Canaries on different coordinates do not disturb each other, and under the claim (and
add-or-remove-one) their noise is independent, so one release gives many independent scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from torch import Tensor

from spectral_dp.audit.instruments.noise_map import NoiseMap
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import LONG, Block, Kind, Record, Target

#: Canaries whose noise is correlated more than this: one of them is left out.
ORTHOGONAL = 1e-3

#: Numbers of a block whose covariances are written down, each with each. A block may be a whole layer.
MOST_SQUARED = 2048


class Canary(NamedTuple):
    """A record made to be noticed.

    Attributes:
        layer: The layer of its coordinate.
        kind: The class of its coordinate.
        record: The record.
        opposite: The record with the opposite gradient.
        support: Indices of the numbers of the release that it moves.
        weights: Its direction there.
        length: How far it moves the release, alone.
    """

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


def make_flocks(
    target: Target, blocks: Sequence[Block], per_block: int, generator: torch.Generator, noise: NoiseMap | None = None
) -> list[Flock]:
    """Chooses canaries: in every block the special coordinates and some others.

    The direction of a canary is not assumed. It is seen by releasing the canary with the noise off. Scores must be
    independent, so of canaries whose noise is correlated (a crop does that) only one is kept.

    Args:
        target: The target to choose for.
        blocks: The blocks to put canaries into.
        per_block: How many canaries a block has, at most.
        generator: Chooses among the coordinates that are not special.
        noise: The noise map of the target. If None, the noise is taken to be white.
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
    weights, at = weights[:, used], members[0].support[used]
    if noise is None:
        covariance = weights @ weights.T
    elif len(used) <= MOST_SQUARED:
        covariance = weights @ noise.covariance(at) @ weights.T
    else:
        deviating = noise.in_deviations(weights, at)
        covariance = deviating @ deviating.T
    deviations = covariance.diagonal().clamp(min=1e-30).sqrt()
    correlation = (covariance / deviations / deviations[:, None]).abs()
    chosen: list[int] = []
    for i in range(len(members)):
        if all(float(correlation[i, j]) < ORTHOGONAL for j in chosen):
            chosen.append(i)
    return [members[i] for i in chosen]
