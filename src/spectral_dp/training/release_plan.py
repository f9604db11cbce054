"""The release plan of a step: which blocks leave, how large they are, and the noise on each.

It is made in one place and it is what the step carries out. Ledger, statement, report and audit read the same value, so
that none of them can say something else than the step does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from spectral_dp.gradients.model import ModelGradients
from spectral_dp.mechanism.clipping import Clipped, Clipping
from spectral_dp.relations import Relation


@dataclass(frozen=True)
class PlannedParameter:
    """What is released of one parameter's gradient.

    Attributes:
        name: Its name in the model.
        size: How many numbers the parameter has.
        coordinates: How many coordinates of its gradient are released.
    """

    name: str
    size: int
    coordinates: int


@dataclass(frozen=True)
class PlannedBlock:
    """A layer, or several that share parameters, which are clipped together.

    Attributes:
        name: The name of its first layer in the model.
        parameters: Those of its parameters that are being trained, in the order of their release.
        max_norm: The bound by which its noise is scaled (see :meth:`Clipping.noise_bounds`).
        sensitivity: What the clipped sum declares for this bound and the plan's relation.
        noise_std: Deviation of the noise on every released coordinate of the sum.
    """

    name: str
    parameters: tuple[PlannedParameter, ...]
    max_norm: float
    sensitivity: float
    noise_std: float

    @property
    def coordinates(self) -> int:
        """How many coordinates of the block are released."""
        return sum(parameter.coordinates for parameter in self.parameters)


@dataclass(frozen=True)
class ReleasePlan:
    """What one logical step releases.

    Formal guarantee. A step that adds independent Gaussian noise of deviation ``noise_std`` to every coordinate of each
    block's clipped sum is one Gaussian mechanism with noise multiplier ``noise_multiplier`` for neighbours under
    ``relation``, by what :meth:`Clipping.noise_bounds` guarantees. Nothing in a plan depends on the records of the step
    that it is for: it may be published.

    Attributes:
        blocks: Everything that is released, in the order of its release.
        noise_multiplier: ``σ`` of all blocks together.
        relation: Which data sets are neighbours.
        expected_batch_size: The public divisor of the noisy sums.
    """

    blocks: tuple[PlannedBlock, ...]
    noise_multiplier: float
    relation: Relation
    expected_batch_size: float


def plan_release(
    gradients: ModelGradients,
    clipping: Clipping,
    *,
    noise_multiplier: float,
    relation: Relation,
    expected_batch_size: float,
) -> ReleasePlan:
    """Returns the plan of the coming step.

    A convolution that is filtered over its input's plane (the paper's Algorithm 2) learns the size of its spectrum from
    the first batch, unless its ``LayerConfig`` gives it: until then there is no plan.
    """
    names = {parameter: name for name, parameter in gradients.named_parameters.items()}
    found = []
    for layers, parameters in gradients.trained_blocks:
        owners = [gradients.owner(parameter) for parameter in parameters]
        counts = [math.prod(rule.coefficient_shape(own_name)) for rule, own_name in owners]
        planned = [PlannedParameter(names[p], p.numel(), n) for p, n in zip(parameters, counts, strict=True)]
        found.append((layers[0].name, tuple(planned)))
    blocks = []
    bounds = clipping.noise_bounds([sum(p.coordinates for p in each) for _, each in found])
    for (layer, each), bound in zip(found, bounds, strict=True):
        sensitivity = Clipped(torch.empty(0), bound).sensitivity(relation)
        noise_std = noise_multiplier * sensitivity if noise_multiplier else 0.0
        blocks.append(PlannedBlock(layer, each, bound, sensitivity, noise_std))
    return ReleasePlan(tuple(blocks), noise_multiplier, relation, expected_batch_size)
