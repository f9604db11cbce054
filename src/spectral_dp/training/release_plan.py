"""The release plan of a step: which blocks are released, how large they are, and how much noise each gets.

The plan is computed here only, and the step carries it out. Ledger, statement, report and audit read the same plan, so
they cannot differ from the step.
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
        name: The name of the parameter in the model.
        size: The number of entries of the parameter.
        coordinates: The number of coordinates of its gradient that are released.
    """

    name: str
    size: int
    coordinates: int


@dataclass(frozen=True)
class PlannedBlock:
    """What is released of a layer, or of several layers that share parameters and are clipped together.

    Attributes:
        name: The name of the first layer of the block in the model.
        parameters: The trained parameters of the block, in the order of their release.
        max_norm: The bound that scales the noise of the block (see :meth:`Clipping.noise_bounds`).
        sensitivity: The sensitivity that the clipped sum declares for this bound and the plan's relation.
        noise_std: The standard deviation of the noise on every released coordinate of the sum.
    """

    name: str
    parameters: tuple[PlannedParameter, ...]
    max_norm: float
    sensitivity: float
    noise_std: float

    @property
    def coordinates(self) -> int:
        """The number of coordinates of the block that are released."""
        return sum(parameter.coordinates for parameter in self.parameters)


@dataclass(frozen=True)
class ReleasePlan:
    """What one logical step releases.

    Formal guarantee.

    * A step that adds independent Gaussian noise of deviation ``noise_std`` to every coordinate of each block's clipped
      sum is one Gaussian mechanism with noise multiplier ``noise_multiplier``, for neighbours under ``relation``. This
      follows from the guarantee of :meth:`Clipping.noise_bounds`.
    * The plan of a step does not depend on the records of that step, so it can be published.

    Attributes:
        blocks: All blocks, in the order of their release.
        noise_multiplier: ``σ``, the noise multiplier of all blocks together.
        relation: Which data sets are neighbours.
        expected_batch_size: The public number by which the noisy sums are divided.
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
    """Returns the plan of the next step.

    Args:
        gradients: The recorder of the model's per-sample gradients.
        clipping: How the contribution of a sample is bounded.
        noise_multiplier: ``σ``, the deviation of the noise in units of the sensitivity.
        relation: Which data sets are neighbours.
        expected_batch_size: The public number by which the noisy sums are divided.

    Raises:
        RuntimeError: If the size of a spectrum is not known yet. A convolution with ``support="signal"`` (the paper's
            Algorithm 2) learns it from its ``LayerConfig``, or else from the first batch.
    """
    names = {parameter: name for name, parameter in gradients.named_parameters.items()}
    found = []
    for layers, parameters in gradients.trained_blocks:
        owners = [gradients.owner(parameter) for parameter in parameters]
        counts = [math.prod(rule.coefficient_shape(own_name)) for rule, own_name in owners]
        planned = [PlannedParameter(names[p], p.numel(), n) for p, n in zip(parameters, counts, strict=True)]
        found.append((layers[0].name, tuple(planned)))
    blocks, nothing = [], torch.empty(0)
    bounds = clipping.noise_bounds([sum(p.coordinates for p in each) for _, each in found])
    for (layer, each), bound in zip(found, bounds, strict=True):
        sensitivity = Clipped(nothing, bound).sensitivity(relation)
        noise_std = noise_multiplier * sensitivity if noise_multiplier else 0.0
        blocks.append(PlannedBlock(layer, each, bound, sensitivity, noise_std))
    return ReleasePlan(tuple(blocks), noise_multiplier, relation, expected_batch_size)
