"""The linear-map audit: the noise multiplier that a release really has, exactly.

Every block of a release is a signal plus Gaussian noise.

* The covariance ``Sigma`` of the noise is found exactly (:mod:`~spectral_dp.audit.instruments.noise_map`).
* The clipped signal ``y`` of one record is seen by releasing it with the noise off.
* ``||Sigma^(-1/2) y||`` is how many deviations apart the data sets with and without that record are. Its inverse is the
  noise multiplier in that direction. A part of ``y`` in the null space of ``Sigma`` leaves without any noise.

The directions that are tried in every chosen block are each coordinate, those in which the block as a linear map shifts
most per length, and some at random. Then follows one record that is worst in every layer at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spectral_dp.audit.instruments.noise_map import NoiseMap
from spectral_dp.audit.report import Verdict
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import LONG, Block, Record, Target

#: Slack for float32: clipping itself aims 1e-5 below its bound.
SLACK = 1e-3

#: Directions tried in every block beside its coordinates: those with the largest singular values, and random ones.
WORST_DIRECTIONS, RANDOM_DIRECTIONS = 4, 3

#: A shift is bare if this share of the clipping bound meets no noise.
BARE = 1e-3


@dataclass
class _Layer:
    """What was found in one layer."""

    noise_multiplier: float = float("inf")
    directions: int = 0
    without_noise: list[str] = field(default_factory=list)
    worst: Record = None


def check_linear_map(
    target: Target, noise: NoiseMap, blocks: Sequence[Block], generator: torch.Generator, *, batch: int = 3
) -> Verdict:
    """Compares the noise multiplier that a target has with the one it claims.

    Args:
        target: The target to audit.
        noise: The noise map of the target, for batches of ``batch`` records.
        blocks: The blocks to look at.
        generator: Chooses the random directions.
        batch: How many records a batch has. All but one of them contribute nothing.
    """
    claim = target.claim
    if not blocks:
        return Verdict.left_out("linear map", "there is no block to look at")
    prober = _Prober(target, noise, batch)
    layers: dict[str, _Layer] = {}
    for block in blocks:
        _look(prober, block, layers.setdefault(block.layer, _Layer()), generator)
    worst = [layer.worst for layer in layers.values() if layer.worst is not None]
    jointly = prober.noise_multiplier(prober.shift(target.together(worst))) if worst else float("inf")
    multiplier = min([jointly, *(layer.noise_multiplier for layer in layers.values())])
    without = {name: layer.without_noise for name, layer in layers.items() if layer.without_noise}
    directions = sum(layer.directions for layer in layers.values())
    note = f"noise: {noise.structure}"
    if target.left_out:
        note += f"; not looked at one by one: {', '.join(target.left_out)}"
    if without:
        first = next(iter(without.items()))
        count = sum(map(len, without.values()))
        note = f"{count} of {directions} directions leave without noise, such as {first[1][0]} of {first[0]}; {note}"
    return Verdict(
        audit="linear map",
        tested=f"{directions} directions of {len(blocks)} blocks of {len(layers)} layers, and jointly",
        quantity="noise multiplier",
        claimed=claim.noise_multiplier,
        measured=multiplier,
        wanted="at least",
        slack=SLACK * claim.noise_multiplier,
        note=note,
        details={
            "per_layer": {name: layer.noise_multiplier for name, layer in layers.items()},
            "jointly": jointly,
            "directions_without_noise": without,
            "noise_structure": noise.structure,
            "releases_for_noise": noise.releases,
            "left_out": target.left_out,
            "blocks": [f"{block.layer}: {block.name}" for block in blocks],
        },
    )


class _Prober:
    """Releases single records with the noise off."""

    def __init__(self, target: Target, noise: NoiseMap, batch: int) -> None:
        self._target, self.noise, self._others = target, noise, [target.null()] * (batch - 1)
        self.length = LONG * max(1.0, target.claim.max_grad_norm)
        self._origin = target.release([target.null(), *self._others], Script())

    def shift(self, record: Record) -> Tensor:
        """Returns how far the record moves the release."""
        return self._target.release([record, *self._others], Script()) - self._origin

    def noise_multiplier(self, shift: Tensor) -> float:
        """Returns the noise multiplier that hides such a shift. It is 0 if a part of the shift leaves without noise."""
        claim, (deviations, bare) = self._target.claim, self.noise.measure(shift)
        if bare > BARE * claim.max_grad_norm:
            return 0.0
        return 1 / (claim.moves * deviations) if deviations else float("inf")


def _look(prober: _Prober, block: Block, layer: _Layer, generator: torch.Generator) -> None:
    """Tries the directions of a block, and enters what is found into its layer."""
    k = len(block.labels)
    shifts = [_try(prober, block, e, label, layer) for e, label in zip(torch.eye(k), block.labels, strict=True)]
    whitened = torch.stack([prober.noise.whiten(shift)[block.support] for shift in shifts], 1)
    worst = torch.linalg.svd(whitened, full_matrices=False).Vh[:WORST_DIRECTIONS]
    for direction in (*worst, *torch.randn(RANDOM_DIRECTIONS, k, generator=generator)):
        _try(prober, block, direction, "a mixture of directions", layer)


def _try(prober: _Prober, block: Block, direction: Tensor, label: str, layer: _Layer) -> Tensor:
    record = block.record(direction, prober.length)
    shift = prober.shift(record)
    multiplier = prober.noise_multiplier(shift)
    layer.directions += 1
    if multiplier == 0:
        layer.without_noise.append(f"{label} of {block.name}")
    if multiplier < layer.noise_multiplier:
        layer.noise_multiplier, layer.worst = multiplier, record
    return shift
