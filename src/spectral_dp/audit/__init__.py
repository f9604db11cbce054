"""Audits: prove the epsilon of a release, and catch the mechanisms that lie. See ``docs/audit.md``.

from spectral_dp import audit

claim = audit.Claim(noise_multiplier=1.1, max_grad_norm=1.0, expected_batch_size=256)
report = audit.audit(audit.SpectralTarget(model, claim, input_shape=(1, 28, 28)))
assert report.ok
"""

from spectral_dp.audit.checks.linear_map import BlockMap, block_map, linear_map
from spectral_dp.audit.checks.neighbours import neighbours
from spectral_dp.audit.noise_map import NoiseMap, noise_map
from spectral_dp.audit.report import Report, Verdict
from spectral_dp.audit.suite import FAST, FULL, Effort, audit
from spectral_dp.audit.targets.function import FunctionTarget, load_function
from spectral_dp.audit.targets.opacus import OpacusTarget
from spectral_dp.audit.targets.spectral import SpectralTarget
from spectral_dp.audit.targets.target import Block, Claim, Target

__all__ = [
    "FAST",
    "FULL",
    "Block",
    "BlockMap",
    "Claim",
    "Effort",
    "FunctionTarget",
    "NoiseMap",
    "OpacusTarget",
    "Report",
    "SpectralTarget",
    "Target",
    "Verdict",
    "audit",
    "block_map",
    "linear_map",
    "load_function",
    "neighbours",
    "noise_map",
]
