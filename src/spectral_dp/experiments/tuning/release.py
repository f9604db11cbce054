"""What an accounted search publishes: the winner and its statement, and nothing else of the search."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spectral_dp.experiments.feature_stages import feature_facts
from spectral_dp.experiments.fine_tuning import fine_tuning_facts
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import ResolvedSettings
from spectral_dp.experiments.statement import as_markdown, provenance
from spectral_dp.experiments.tuning.plan import AccountedSearch
from spectral_dp.files import partial_directory, write_json, write_text

COVERS = "settings, seed, weights and noisy score of the winner, and whatever is computed from them"
NOT_COVERED = (
    "how many trials there were, how long they took, and everything else about them: scores, accuracies, weights, logs",
    "the exact accuracy of the winner on held-out records",
    "another search on the same records: each costs its own epsilon, and they add up",
)
ASSUMPTIONS = (
    "trials are independent: each draws one of the listed candidates uniformly, with replacement, and a seed",
    "the number of trials was drawn once from the stated law, by the operating system, and told to nobody",
    "the score is the accuracy on held-out records with Gaussian noise, which is part of the guarantee",
    "held-out records are protected as training records are; a record is one or the other, by its place alone",
    "whether a trial fails or is interrupted does not depend on the records; a failed trial counts as the worst",
)
_NO_TIME = 315_619_200  # a day in 1980, the earliest that all archives can keep


@dataclass(frozen=True)
class Winner:
    """The best trial of a search."""

    settings: ResolvedSettings
    score: float
    run: RunDirectory


def publish(plan: AccountedSearch, winner: Winner | None, released: Path) -> dict[str, Any]:
    """Writes the winner's settings and weights and the statement to a directory, whole; returns the statement.

    If the directory is there already, it stays as it is. Its files tell no time: beside that of ``search.json`` it
    would tell how long the search took, and so about how many trials there were.
    """
    statement = selection_statement(plan, winner)
    if released.exists():
        return statement
    with partial_directory(released) as directory:
        content = directory / "released"
        content.mkdir()
        if winner is not None:
            write_json(content / "config.json", winner.settings.to_dict())
            shutil.copyfile(winner.run.weights, content / "weights.safetensors")
        write_json(content / "privacy.json", statement)
        told = {name: value for name, value in statement.items() if name != "selection"}
        write_text(content / "privacy.md", as_markdown(told))
        for path in (*content.iterdir(), content):
            os.utime(path, (_NO_TIME, _NO_TIME))
        content.rename(released)
    return statement


def selection_statement(plan: AccountedSearch, winner: Winner | None) -> dict[str, Any]:
    """Returns the privacy statement of a search as plain values. Epsilon can be computed again from ``selection``."""
    weak = f"delta {plan.delta:g} is not below one over the number of records: it protects nobody"
    facts = [feature_facts(settings) | fine_tuning_facts(settings) for settings in plan.candidates]
    public = dict.fromkeys(f"{name}: {fact}" for each in facts for name, fact in each.items())
    found: dict[str, Any] = {"winner": None, "noisy_score": None}
    if winner is not None:
        found = {"winner": "in config.json and weights.safetensors", "noisy_score": winner.score}
    return {
        "private": plan.protects,
        "mechanism": "private selection (Papernot & Steinke 2022): the best of a random number of private runs",
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "relation": "add_or_remove_one",
        "accountant": "rdp",
        "number_of_trials": f"{plan.selection.law}; the number itself is not released",
        **found,
        "noise_of_the_score": plan.score_noise / plan.held_out,
        "training_records": plan.training,
        "held_out_records": plan.held_out,
        "epsilon_of_one_run": plan.selection.trial_epsilon(plan.delta),
        "epsilon_of_one_run_is": "what a single run would spend, had its settings been fixed in advance; it is NOT "
        "what this release spends",
        "assumptions": [*ASSUMPTIONS, *public],  # of all candidates: those that lost took part in the choice
        "covers": COVERS,
        "not_covered": list(NOT_COVERED),
        "warnings": [] if plan.protects else [weak],
        "selection": plan.selection.to_dict(),
        "made_by": provenance(),
    }
