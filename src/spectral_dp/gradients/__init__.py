"""Norms and clipped sums of per-sample gradients, in filtered spectral coordinates.

- ``model``: the gradients of a whole model, which is what the rest of the package uses.
- ``recording/``: what went into each layer, what came back to it, and what it left behind.
- ``rules/``: one file for each kind of layer. ``kinds`` and ``registry`` tell which rule a layer has.
- ``uses``: one use of a layer, from the backward pass to its clipped sum.
- ``norms``, ``sums``, ``precision``: the numerics that rules share.
- ``blocks``, ``compatibility``: which layers are clipped together, and which modules cannot be trained privately.
"""

from spectral_dp.gradients.compatibility import find_problems as find_problems
from spectral_dp.gradients.compatibility import fix as fix
from spectral_dp.gradients.compatibility import validate as validate
from spectral_dp.gradients.model import ModelGradients as ModelGradients
from spectral_dp.gradients.rules import (  # noqa: F401 - register rules
    activation,
    attention,
    block_circulant,
    channel_norm,
    conv,
    conv3d,
    conv_transposed,
    embedding,
    linear,
    linear_in_basis,
    normalization,
    recurrent,
    scaled_norms,
)
from spectral_dp.gradients.rules.layer_config import LayerConfig as LayerConfig
from spectral_dp.gradients.rules.registry import register_rule as register_rule
from spectral_dp.gradients.rules.rule import GhostRule as GhostRule
from spectral_dp.gradients.rules.rule import Rule as Rule
