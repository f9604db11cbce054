"""Audits: test the epsilon that a release claims, and catch mechanisms that do not keep it. See ``docs/audit.md``.

    from spectral_dp import audit

    claim = audit.Claim(noise_multiplier=1.1, max_grad_norm=1.0, expected_batch_size=256)
    report = audit.run_audit(audit.SpectralTarget(model, claim, input_shape=(1, 28, 28)))
    assert report.ok

From the bottom up:

* ``statistics/``: confidence bounds and tests on plain numbers.
* ``targets/``: what can be audited (a function, our training step, that of Opacus), and what is claimed of it.
* ``instruments/``: what is measured of any target: the exact map of its noise, and canaries.
* ``report.py``: verdicts, and the report that collects them.
* ``checks/``: one function for each audit, named as the report names its lines.
* ``suite.py``: :func:`run_audit` makes every check that a target allows.
"""

from spectral_dp.audit.checks.linear_map import check_linear_map as check_linear_map
from spectral_dp.audit.checks.neighbours import check_neighbours as check_neighbours
from spectral_dp.audit.instruments.noise_map import NoiseMap as NoiseMap
from spectral_dp.audit.instruments.noise_search import find_noise_map as find_noise_map
from spectral_dp.audit.report import Report as Report
from spectral_dp.audit.report import Verdict as Verdict
from spectral_dp.audit.suite import FAST as FAST
from spectral_dp.audit.suite import FULL as FULL
from spectral_dp.audit.suite import Effort as Effort
from spectral_dp.audit.suite import run_audit as run_audit
from spectral_dp.audit.targets.function import FunctionTarget as FunctionTarget
from spectral_dp.audit.targets.function import load_function as load_function
from spectral_dp.audit.targets.opacus import OpacusTarget as OpacusTarget
from spectral_dp.audit.targets.spectral import SpectralTarget as SpectralTarget
from spectral_dp.audit.targets.target import Block as Block
from spectral_dp.audit.targets.target import Claim as Claim
from spectral_dp.audit.targets.target import Target as Target
