"""Accounting: what private training spends, and the noise or the steps that fit a budget.

- ``calibration``: epsilon and delta of equal steps, and the noise or steps for a target. It states the guarantee.
- ``ledger``: which releases were made, in order, and what they have spent together.
- ``budget``: a plan, and whether one step more keeps within it.
- ``privacy_loss``: what phases of steps spend, built on ``pairs`` (dominating pairs of one step), ``composition``
  (discretised losses) and ``coarsening`` (fine schedules).
"""

from spectral_dp.accounting.calibration import (
    calibrate_noise,
    calibrate_steps,
    delta,
    epsilon,
    warn_if_delta_too_large,
)
from spectral_dp.accounting.ledger import Ledger
from spectral_dp.accounting.privacy_loss import (
    Accountant,
    Phase,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)

__all__ = [
    "Accountant",
    "Ledger",
    "Phase",
    "calibrate_noise",
    "calibrate_steps",
    "delta",
    "epsilon",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_noise_multiplier",
    "warn_if_delta_too_large",
]
