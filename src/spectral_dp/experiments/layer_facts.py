"""What is released of each layer, and the noise on it: facts that depend on no record, or on released ones only."""

from __future__ import annotations

from typing import Any

from spectral_dp.experiments.method import Method
from spectral_dp.experiments.methods import EngineMethod
from spectral_dp.training.noise_levels import gradient_noise


def describe_layers(method: Method) -> list[dict[str, Any]]:
    """Returns one entry for each trained parameter; none for methods that are not ours. Ask after the first step.

    Before it, the spectrum of the paper's signal support has no size: it is that of the layer's input.

    An entry has ``name``, ``kind``, ``parameters`` (how many numbers), ``released`` (how many coordinates leave),
    ``filtered`` (whether it is), ``noise_std`` (of each released coordinate of the gradient),
    ``noise_std_per_parameter`` (what is left of it in the gradient), and for filtered weights ``transform`` and
    ``gains``: the post-gain of every coordinate, zero if dropped, as nested lists over the transformed axes.
    """
    if not isinstance(method, EngineMethod):
        return []
    plan, gradients = method.optimizer.release_plan(), method.optimizer.gradients
    noise = gradient_noise(plan, gradients)
    facts = []
    for block in plan.blocks:
        noise_std = block.noise_std / plan.expected_batch_size
        for planned in block.parameters:
            rule, own_name = gradients.owner(gradients.named_parameters[planned.name])
            gains = rule.gains if own_name == "weight" else None
            entry: dict[str, Any] = {
                "name": planned.name,
                "kind": type(rule.module).__name__,
                "parameters": planned.size,
                "released": planned.coordinates,
                "filtered": gains is not None,
                "noise_std": noise_std,
                "noise_std_per_parameter": noise[planned.name],
            }
            if gains is not None:
                entry |= {"transform": rule.transform.name, "gains": gains.post.double().tolist()}
            facts.append(entry)
    return facts
