"""The plan of an accounted search: its candidates with their noise, and what the release of the best trial spends.

Nothing here depends on a record, but for the number of records, which is public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spectral_dp.accounting import Phase, Selection, TrialsLaw, calibrate_noise
from spectral_dp.accounting.selection import calibrate_selection
from spectral_dp.experiments.feature_data import statistics_phases
from spectral_dp.experiments.feature_stages import features_are_public
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.experiments.trainer import load_data
from spectral_dp.experiments.tuning.space import SearchSpace
from spectral_dp.relations import Relation

METHODS = ("spectral", "dpsgd")


@dataclass(frozen=True)
class AccountedSearch:
    """Everything about an accounted search that is decided in advance and public.

    Attributes:
        candidates: The settings that a trial may have, each with its noise multiplier.
        searched: The names of the searched settings.
        selection: What the release of the best trial spends.
        delta: The delta of the guarantee.
        score_noise: Standard deviation of the noise on a score, in held-out records.
        training: The number of training records.
        held_out: The number of held-out records.
    """

    candidates: tuple[ResolvedSettings, ...]
    searched: tuple[str, ...]
    selection: Selection
    delta: float
    score_noise: float
    training: int
    held_out: int

    @property
    def epsilon(self) -> float:
        """What the release of the best trial spends."""
        return self.selection.epsilon(self.delta)

    @property
    def protects(self) -> bool:
        """Whether delta is small enough to protect anybody."""
        return self.delta * (self.training + self.held_out) < 1

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, by which a search is recognised when it goes on."""
        return {
            "way": "accounted",
            "selection": self.selection.to_dict(),
            "epsilon": self.epsilon,
            "delta": self.delta,
            "score_noise": self.score_noise,
            "records": {"training": self.training, "held_out": self.held_out},
            "searched": list(self.searched),
            "candidates": [settings.essential() for settings in self.candidates],
        }


def plan_search(
    given: Mapping[str, Any], space: SearchSpace, law: TrialsLaw, *, candidates: int, score_noise: float
) -> AccountedSearch:
    """Returns the plan of a search, before anything is run.

    Args:
        given: The settings that are not searched. ``epsilon`` is what the *whole search* may spend, and the noise of
            every candidate is calibrated for it; with ``noise_multiplier``, given or searched, the epsilon follows.
        space: The searched settings.
        law: The law of the number of trials.
        candidates: How many candidates the trials are drawn from.
        score_noise: Standard deviation of the noise on a score, in held-out records.

    Raises:
        SettingsError: If the settings cannot be accounted for. The message says what to change.
    """
    if not (math.isfinite(score_noise) and score_noise > 0):
        raise SettingsError(f"the score of a trial needs noise: score_noise must be positive, got {score_noise}")
    drawn = space.candidates(given, candidates)
    first = drawn[0]
    for settings in drawn:
        _refuse(settings)
    data = load_data(first)
    training, held_out = len(data.train_labels), len(data.test_labels)
    target, delta = first.epsilon, first.delta
    scores = (Phase(score_noise, 1.0, 1),)

    def selected(made: list[ResolvedSettings]) -> Selection:
        alternatives = dict.fromkeys([*(planned_phases(settings, training) for settings in made), scores])
        return Selection(law, tuple(alternatives))

    made: list[ResolvedSettings] = drawn
    if target is not None:
        noise: dict[tuple[Any, ...], float] = {}

        def calibrated(settings: ResolvedSettings, epsilon: float) -> ResolvedSettings:
            beside, (*_, steps) = statistics_phases(settings), planned_phases(settings, training)
            key = (epsilon, steps[1:], beside)
            if key not in noise:
                noise[key] = calibrate_noise(epsilon, delta, *steps[1:], accountant="rdp", beside=beside)
            return replace(settings, epsilon=None, noise_multiplier=noise[key])

        trial, _ = calibrate_selection(target, delta, lambda e: selected([calibrated(s, e) for s in drawn]))
        made = [calibrated(settings, trial) for settings in drawn]
    searched = tuple(dimension.name for dimension in space.dimensions)
    search = AccountedSearch(tuple(made), searched, selected(made), delta, score_noise, training, held_out)
    if not math.isfinite(search.epsilon):
        raise SettingsError("a candidate has almost no noise, so the epsilon of the search is infinite: add noise")
    return search


def planned_phases(settings: ResolvedSettings, records: int) -> tuple[Phase, ...]:
    """Returns the releases of the training records that a trial makes; its noise may not be known yet."""
    return (*statistics_phases(settings), Phase(settings.noise_multiplier or 0.0, *settings.sampling(records)))


def _refuse(settings: ResolvedSettings) -> None:
    """Raises ``SettingsError`` for what a selection does not cover."""
    if settings.method not in METHODS:
        raise SettingsError(f"an accounted search has trials of method {' or '.join(METHODS)}, not {settings.method}")
    if settings.reproducible:
        raise SettingsError("noise from a seed protects nobody: leave reproducible out, or search without accounting")
    if settings.unsafe_diagnostics:
        raise SettingsError("unsafe_diagnostics records raw figures of the records: leave it out of a search")
    if not features_are_public(settings):
        raise SettingsError("features or axes that were made from the records are not covered: use generated images")
    if settings.relation is not Relation.ADD_OR_REMOVE_ONE:
        raise SettingsError("a selection is accounted for under add_or_remove_one only")
    if not settings.validation_size:
        raise SettingsError("trials are scored on held-out records: give validation_size, such as a tenth of them")
