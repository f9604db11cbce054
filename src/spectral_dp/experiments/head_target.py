"""The release of a one-shot head as something to audit, in a small size: what it does to a record is the same."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch
from torch import Tensor

from spectral_dp.accounting import Ledger, Phase
from spectral_dp.audit.targets.function import FunctionTarget
from spectral_dp.audit.targets.target import Claim
from spectral_dp.experiments.feature_data import statistics_phases
from spectral_dp.experiments.one_shot import bound_of_head, noise_of_head
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.heads.class_means import class_sums
from spectral_dp.heads.least_squares import joint_bound
from spectral_dp.mechanism.clipping import Clipped, clip_and_sum
from spectral_dp.mechanism.noise import NoiseSource, SeededNoise
from spectral_dp.mechanism.release import release_sum

#: How many numbers the audited release has. The auditor tries every one of them.
DIMENSION = 96

#: Clips the vectors that records contribute, sums them, charges a ledger and adds noise.
Release = Callable[[Tensor, float, Ledger, NoiseSource], Tensor]


def target_of_head(
    settings: ResolvedSettings, claim: Claim | None = None, release: Release | None = None
) -> FunctionTarget:
    """Returns the release of the one-shot head that settings describe.

    The auditor gives it the vectors that records contribute. Class means clip the very vectors that they sum. The
    vectors of least squares are never formed in a run; that their sum is clipped as if they were is tested in
    ``tests/heads/test_least_squares.py``.

    Args:
        settings: The settings of the run.
        claim: What is claimed of a finished run; follows from the settings where not given.
        release: What makes the release; tests put broken ones here.
    """
    sigma = claim.noise_multiplier if claim else noise_of_head(settings)
    if not sigma > 0:
        raise SettingsError(
            "without noise there is no privacy to audit: give an epsilon, or a noise_multiplier above 0"
        )
    return target_of_release(
        settings,
        release or RELEASES[settings.method],
        sigma,
        bound_of_head(settings),
        dimension=DIMENSION,
        name=f"{settings.model} ({settings.method})",
        beside=statistics_phases(settings),
        claim=claim,
    )


def target_of_release(
    settings: ResolvedSettings,
    release: Release,
    noise_multiplier: float,
    bound: float,
    *,
    dimension: int,
    name: str,
    beside: tuple[Phase, ...] = (),
    claim: Claim | None = None,
) -> FunctionTarget:
    """Returns a single release of all records.

    The epsilon that is stated of it is what its own ledger says after a release, so one that is not charged is seen.

    Args:
        settings: The settings of the run that makes it.
        release: Makes it, of the vectors ``(n, dimension)`` that records contribute.
        noise_multiplier: The noise multiplier that is claimed.
        bound: The bound of what a record contributes.
        dimension: The length of such a vector.
        name: What the report calls it.
        beside: The other releases of the run.
        claim: What is claimed of a finished run; follows from the rest where not given.
    """
    # A source whose noise the auditor can take the place of; where it comes from in a run is not what is audited here.
    noise = SeededNoise(secrets.randbits(62), reproducibility_over_privacy=True)
    if claim is None:
        ledger = Ledger(settings.relation)
        for phase in beside:
            ledger.record(*phase)
        release(torch.zeros(0, dimension).double(), noise_multiplier, ledger, noise)
        claim = Claim(
            noise_multiplier=noise_multiplier,
            max_grad_norm=bound,
            expected_batch_size=1.0,
            delta=settings.delta,
            relation=settings.relation,
            stated_epsilon=ledger.epsilon(settings.delta),
            beside=beside,
        )

    def released(vectors: Tensor) -> Tensor:
        return release(vectors, noise_multiplier, Ledger(settings.relation), noise)

    return FunctionTarget(released, claim, dimension=dimension, returns="sum", name=name, dtype=torch.float64)


def _class_means(vectors: Tensor, sigma: float, ledger: Ledger, noise: NoiseSource) -> Tensor:
    only = torch.zeros(len(vectors), dtype=torch.int64)
    return _one(class_sums(vectors, only, classes=1), sigma, ledger, noise)


def _least_squares(vectors: Tensor, sigma: float, ledger: Ledger, noise: NoiseSource) -> Tensor:
    return _one(clip_and_sum(vectors, joint_bound()), sigma, ledger, noise)


def _one(clipped: Clipped, sigma: float, ledger: Ledger, noise: NoiseSource) -> Tensor:
    return release_sum([clipped], noise_multiplier=sigma, ledger=ledger, noise=noise).flatten()


#: The release of each method.
RELEASES: dict[str, Release] = {"class-means": _class_means, "least-squares": _least_squares}
