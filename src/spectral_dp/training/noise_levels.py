"""How much noise a release leaves on the gradient of each parameter. It is public: it follows from the release plan."""

from __future__ import annotations

import math

from spectral_dp.gradients.model import ModelGradients
from spectral_dp.mechanism.public_basis import PublicBasis
from spectral_dp.training.release_plan import ReleasePlan


def gradient_noise(plan: ReleasePlan, gradients: ModelGradients) -> dict[str, float]:
    """Returns the standard deviation of the noise on an entry of the gradient, by the name of the parameter.

    It is the root mean square over the entries. A filter may leave more noise on some entries than on others.

    Args:
        plan: The plan of the release.
        gradients: The recorder of the model's gradients, whose filters are those of this release.
    """
    levels = {}
    for block in plan.blocks:
        for planned in block.parameters:
            rule, own_name = gradients.owner(gradients.named_parameters[planned.name])
            gains = rule.gains if own_name == "weight" else None
            left = planned.coordinates / planned.size if gains is None else gains.noise_variance
            if isinstance(rule.transform, PublicBasis) and gains is not None:
                left *= rule.transform.rank / rule.transform.width  # of so many directions, the others get no noise
            levels[planned.name] = block.noise_std / plan.expected_batch_size * math.sqrt(left)
    return levels
