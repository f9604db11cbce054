"""Accounting: how much privacy training spends, and which noise or how many steps fit a budget.

- ``calibration``: computes epsilon and delta of equal steps, and the noise or the number of steps for a target. Its
  docstring states the guarantee of this folder.
- ``ledger``: lists the releases that were made, in order, and computes what they have spent together.
- ``selection``: computes what it costs to run several trials and to release the best.
- ``membership``: what a guarantee means for one record: how often an attacker who guesses can be right.
- ``budget``: decides whether one more step stays within a planned budget.
- ``privacy_loss``: computes what phases of steps spend. It is built on ``pairs`` (the dominating pairs of one step),
  ``composition`` (discretised privacy losses) and ``coarsening`` (schedules with many different steps).
"""

from typing import TYPE_CHECKING, Any

from spectral_dp.accounting.calibration import calibrate_noise as calibrate_noise
from spectral_dp.accounting.calibration import calibrate_steps as calibrate_steps
from spectral_dp.accounting.calibration import delta as delta
from spectral_dp.accounting.calibration import epsilon as epsilon
from spectral_dp.accounting.calibration import warn_if_delta_too_large as warn_if_delta_too_large
from spectral_dp.accounting.ledger import Ledger as Ledger
from spectral_dp.accounting.privacy_loss import Accountant as Accountant
from spectral_dp.accounting.privacy_loss import Phase as Phase
from spectral_dp.accounting.privacy_loss import gaussian_delta as gaussian_delta
from spectral_dp.accounting.privacy_loss import gaussian_epsilon as gaussian_epsilon
from spectral_dp.accounting.privacy_loss import gaussian_noise_multiplier as gaussian_noise_multiplier

if TYPE_CHECKING:
    from spectral_dp.accounting.selection import Selection as Selection
    from spectral_dp.accounting.selection import TrialsLaw as TrialsLaw


def __getattr__(name: str) -> Any:
    if name in ("Selection", "TrialsLaw"):  # late: dp_accounting takes half a second, and training does not need it
        from spectral_dp.accounting import selection

        return getattr(selection, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
