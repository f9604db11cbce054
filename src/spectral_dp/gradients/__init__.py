"""Per-sample spectral gradients: one file a layer kind, and the model as a whole."""

from spectral_dp.gradients.compatibility import find_problems, fix, validate
from spectral_dp.gradients.model import ModelGradients, RecordedBatch
from spectral_dp.gradients.rules import block_circulant, conv, embedding, linear, normalization  # noqa: F401 - register rules
from spectral_dp.gradients.rules.rule import Formed, FormedRule, LayerConfig, Rule, register_rule

__all__ = [
    "Formed",
    "FormedRule",
    "LayerConfig",
    "ModelGradients",
    "RecordedBatch",
    "Rule",
    "find_problems",
    "fix",
    "register_rule",
    "validate",
]
