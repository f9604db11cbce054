"""What an accounted search decides once and for all when it begins: how many trials, of which candidates.

The decision is written down before the first trial begins. Whoever goes on with a search reads it, and never decides
again: a number of trials that is drawn anew after a look at the first results, or a trial that is run again until it
is lucky, is not what the epsilon of a selection covers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spectral_dp.accounting import TrialsLaw
from spectral_dp.errors import SpectralDPError
from spectral_dp.files import digest_of, write_json


class SearchError(SpectralDPError, RuntimeError):
    """A search that cannot go on, with the reason."""


@dataclass(frozen=True)
class Trial:
    """One trial: the number of its candidate, and the seed of its initial weights and of its augmentation."""

    candidate: int
    seed: int


def draw_trials(law: TrialsLaw, candidates: int) -> tuple[Trial, ...]:
    """Returns the trials of a new search.

    Formal guarantee. The number of trials follows ``law``; every trial has a uniform candidate and a uniform seed. All
    of it is independent, depends on no record, and comes from the random numbers of the operating system.
    """
    return tuple(Trial(secrets.randbelow(candidates), secrets.randbelow(2**31)) for _ in range(law.draw()))


class DrawFile:
    """The file that keeps the decision of a search.

    Args:
        path: The file.
        plan: A description of the search, which must be the same whenever it goes on.
    """

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        self.path, self._plan = path, digest_of(plan)

    def trials(self, law: TrialsLaw, candidates: int) -> tuple[Trial, ...]:
        """Returns the trials of the search: drawn and written if it is new, read if it was begun before.

        Raises:
            SearchError: If the file was changed, or belongs to another search.
        """
        if not self.path.exists():
            content = {"plan": self._plan, "trials": [asdict(trial) for trial in draw_trials(law, candidates)]}
            write_json(self.path, content | {"seal": digest_of(content)})
        try:
            content = json.loads(self.path.read_text())
            seal = content.pop("seal")
            trials = tuple(Trial(**trial) for trial in content["trials"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SearchError(f"{self.path} is damaged, so this search cannot go on: {error}") from error
        if seal != digest_of(content) or content["plan"] != self._plan:
            raise SearchError(
                f"{self.path} was changed, or belongs to another search. What a search has drawn stays as it is: begin "
                "a new one in another directory, which costs its epsilon in addition"
            )
        return trials
