"""What is released of each layer, and the noise on it: facts that depend on no record, or on released ones only."""

from __future__ import annotations

import math
from typing import Any

from spectral_dp.experiments.methods import Method, Ours
from spectral_dp.mechanism.clipping import Clipped
from spectral_dp.training.optimizer import PrivateOptimizer


def layer_facts(method: Method) -> list[dict[str, Any]]:
    """Returns one entry for each trained parameter; none for methods that are not ours. Ask after the first step.

    Before it, the spectrum of the paper's signal support has no size: it is that of the layer's input.

    An entry has ``name``, ``kind``, ``parameters`` (how many numbers), ``released`` (how many coordinates leave),
    ``noise_std`` (of each released coordinate of the gradient), ``noise_std_per_parameter`` (what is left of it in the
    gradient), and for filtered weights ``transform`` and ``gains``: the post-gain of every coordinate, zero if dropped,
    as nested lists over the transformed axes.
    """
    return _facts(method.private) if isinstance(method, Ours) else []


def _facts(optimizer: PrivateOptimizer) -> list[dict[str, Any]]:
    gradients = optimizer.gradients
    blocks = gradients.trained_blocks
    sizes = [sum(gradients.zeros(p).numel() for p in parameters) for _, parameters in blocks]
    facts = []
    for (layers, parameters), bound in zip(blocks, optimizer.clipping.noise_bounds(sizes), strict=True):
        name, rule = layers[0]
        names = {parameter: own for own, parameter in rule.parameters().items()}
        for parameter in parameters:
            released = gradients.zeros(parameter)
            sensitivity = Clipped(released, bound).sensitivity(optimizer.relation)
            noise_std = optimizer.noise_multiplier * sensitivity / optimizer.expected_batch_size
            gains = rule.gains if names.get(parameter) == "weight" else None
            left = released.numel() / parameter.numel() if gains is None else gains.noise_variance
            entry: dict[str, Any] = {
                "name": f"{name}.{names.get(parameter, 'parameter')}",
                "kind": type(rule.module).__name__,
                "parameters": parameter.numel(),
                "released": released.numel(),
                "noise_std": noise_std,
                "noise_std_per_parameter": noise_std * math.sqrt(left),
            }
            if gains is not None:
                entry |= {"transform": rule.transform.name, "gains": gains.post.double().tolist()}
            facts.append(entry)
    return facts
