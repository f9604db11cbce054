"""The release of a one-shot head as something to audit, in a small size: what it does to a record is the same."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from spectral_dp.accounting import Ledger, Phase
from spectral_dp.audit.targets.function import FunctionTarget, hostile_vectors, spectrum_kinds
from spectral_dp.audit.targets.target import LONG, SHORT, Block, Claim, Hostile, Kind, Record
from spectral_dp.experiments.feature_data import statistics_phases
from spectral_dp.experiments.one_shot import bound_of_head, noise_of_head
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.heads.class_means import class_sums
from spectral_dp.heads.least_squares import gram_and_moments
from spectral_dp.mechanism.clipping import Clipped, NonFiniteWarning
from spectral_dp.mechanism.noise import NoiseSource, SeededNoise
from spectral_dp.mechanism.release import release_sum
from spectral_dp.mechanism.transforms import get_transform

#: How many features and classes the records of the audited release have.
FEATURES, CLASSES = 16, 3

#: Clips what records of features ``(n, d)``, labels ``(n,)`` and so many classes contribute, and sums it.
Sums = Callable[[Tensor, Tensor, int], Clipped]

#: Clips the vectors that records contribute, sums them, charges a ledger and adds noise.
Release = Callable[[Tensor, float, Ledger, NoiseSource], Tensor]

#: What each method sums: the very functions that a run calls.
SUMS: dict[str, Sums] = {"class-means": class_sums, "least-squares": gram_and_moments}


def target_of_head(
    settings: ResolvedSettings,
    claim: Claim | None = None,
    *,
    sums: Sums | None = None,
    release: Callable[..., Tensor] = release_sum,
) -> FunctionTarget:
    """Returns the release of the one-shot head that settings describe.

    Records go through the functions that clip, sum and release them in a run. They are not brought to unit length
    before, as they are in a run, because the bound must not rest on that.

    Args:
        settings: The settings of the run.
        claim: What is claimed of a finished run; follows from the settings where not given.
        sums: What clips and sums the records; tests put broken ones here.
        release: What releases their sum; tests put broken ones here.
    """
    sigma = claim.noise_multiplier if claim else noise_of_head(settings)
    if not sigma > 0:
        raise SettingsError(
            "without noise there is no privacy to audit: give an epsilon, or a noise_multiplier above 0"
        )
    summed = sums or SUMS[settings.method]

    def made(rows: Tensor, sigma: float, ledger: Ledger, noise: NoiseSource) -> Tensor:
        # As a run reads them, an empty part first: a fault may be in all parts but that.
        parts = (summed(part[:, :-1], part[:, -1].long(), CLASSES) for part in (rows[:0], *rows.tensor_split(3)))
        return release(parts, noise_multiplier=sigma, ledger=ledger, noise=noise).flatten()

    return target_of_release(
        settings,
        made,
        sigma,
        bound_of_head(settings),
        dimension=FEATURES + 1,
        name=f"{settings.model} ({settings.method})",
        beside=statistics_phases(settings),
        claim=claim,
        kind=HeadTarget,
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
    kind: type[FunctionTarget] = FunctionTarget,
) -> FunctionTarget:
    """Returns a single release of all records.

    The epsilon that is stated of it is what its own ledger says after a release, so one that is not charged is seen.

    Args:
        settings: The settings of the run that makes it.
        release: Makes it, of the vectors ``(n, dimension)`` that records are.
        noise_multiplier: The noise multiplier that is claimed.
        bound: The bound of what a record contributes.
        dimension: The length of such a vector.
        name: What the report calls it.
        beside: The other releases of the run.
        claim: What is claimed of a finished run; follows from the rest where not given.
        kind: The kind of target, which knows what records there are.
    """
    # A source whose noise the auditor can take the place of; where it comes from in a run is not what is audited here.
    noise = SeededNoise(secrets.randbits(62), reproducibility_over_privacy=True)
    ledger = Ledger(settings.relation)
    for phase in beside:
        ledger.record(*phase)
    of_nothing = release(torch.zeros(0, dimension).double(), noise_multiplier, ledger, noise)
    claim = claim or Claim(
        noise_multiplier=noise_multiplier,
        max_grad_norm=bound,
        expected_batch_size=1.0,
        delta=settings.delta,
        relation=settings.relation,
        stated_epsilon=ledger.epsilon(settings.delta),
        beside=beside,
    )

    def released(vectors: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)  # the auditor's own records
            return release(vectors, noise_multiplier, Ledger(settings.relation), noise)

    return kind(
        released,
        claim,
        dimension=dimension,
        returns="sum",
        name=name,
        dtype=torch.float64,
        released=len(of_nothing),
    )


class HeadTarget(FunctionTarget):
    """A release of features with labels: a record is its features, and the number of its class behind them.

    What a record contributes is no linear function of its features. But features that are orthogonal to each other
    contribute what is orthogonal, so there are canaries as for any other release, and records of every length that a
    clip might treat in another way: of length one (as in a run, with moments as long as the Gram matrix of least
    squares), and far longer (where its Gram matrix is all there is).

    The opposite of a record's features has the same Gram matrix. So under replace-one, canaries of least squares tell
    less than a worst pair of records would; the other audits do not depend on it.
    """

    def blocks(self, most: int, generator: torch.Generator) -> list[Block]:
        """Returns features on one coordinate and on all, at unit length and long, of the first and the last class."""
        d, everything = self.dimension - 1, torch.arange(self.size)
        coordinates = torch.eye(d).double(), (*(Kind.INTERIOR,) * (d - 1), Kind.LAST)
        spectrum = get_transform("fourier").basis(d), spectrum_kinds(d)
        blocks = []
        for length, make in (("unit length", _unit_record), ("long", _record)):
            for name, label, (basis, kinds) in (("coordinate", 0, coordinates), ("frequency", CLASSES - 1, spectrum)):
                labels = tuple(f"{name} {i}" for i in range(d))
                found = f"{name} of class {label}, {length}"
                blocks.append(Block("head", found, basis, labels, kinds, everything, partial(make, label=label)))
        return blocks

    def together(self, records: Sequence[Record]) -> Record:
        """Returns the first record: there is one layer only."""
        return records[0]

    def ordinary(self, count: int, generator: torch.Generator) -> list[Record]:
        """Returns normal features about as long as in a run, of any class."""
        features = torch.randn(count, self.dimension - 1, generator=generator).double() / (self.dimension - 1) ** 0.5
        labels = torch.randint(CLASSES, (count,), generator=generator)
        return [_record(x, int(label)) for x, label in zip(features, labels, strict=True)]

    def mates(self, generator: torch.Generator) -> list[Record]:
        """Returns features by turns too long and short, of all classes. The first are one number only."""
        rows = [x[:-1] for x in self.ordinary(4, generator)]
        rows[0] = torch.eye(len(rows[0])).double()[len(rows[0]) // 2]
        lengths = (LONG, SHORT[0], LONG, SHORT[1])
        return [
            _record(length * x / x.norm(), i % CLASSES) for i, (length, x) in enumerate(zip(lengths, rows, strict=True))
        ]

    def hostile(self, generator: torch.Generator) -> list[Hostile]:
        """Returns features that are too long by little and by much, tiny, flat, and not finite, of all classes."""
        (x,) = self.ordinary(1, generator)
        found = hostile_vectors(x[:-1], 1.0)
        return [h._replace(record=_record(h.record, i % CLASSES)) for i, h in enumerate(found)]


def _unit_record(features: Tensor, label: int) -> Tensor:
    return _record(features / features.norm(), label)


def _record(features: Tensor, label: int) -> Tensor:
    return torch.cat([features, features.new_tensor([label])])
