"""A privacy statement in plain words: what is promised, and what that means for one person's record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spectral_dp.accounting.membership import largest_detection_rate, largest_guess_accuracy
from spectral_dp.experiments.rounding import rounded_up

_NEIGHBOURS = {"add_or_remove_one": "adding or removing one record", "replace_one": "replacing one record by another"}
_QUESTIONS = {
    "add_or_remove_one": "whether one certain person's record was used for training",
    "replace_one": "which of two records of one certain person was used for training",
}

#: The share of others whom the attacker of the second sentence accuses wrongly.
FALSE_ALARMS = 0.01


def attack_odds(guarantees: list[tuple[float, float]]) -> dict[str, float]:
    """Returns what a statement keeps of the attackers: how often they are right, whom they recognise at most."""
    return {
        "guess_accuracy": largest_guess_accuracy(guarantees),
        "detection_rate_at_1_percent_false_alarms": largest_detection_rate(guarantees, FALSE_ALARMS),
    }


def promise(statement: Mapping[str, Any]) -> str:
    """Returns the guarantee of a statement that has an epsilon, with its numbers rounded to the safe side."""
    return (
        f"({rounded_up(statement['epsilon'])}, {statement['delta']:g})-differential privacy with respect to "
        f"{neighbours(statement)}"
    )


def neighbours(statement: Mapping[str, Any]) -> str:
    """Returns how neighbouring data sets differ."""
    return _NEIGHBOURS.get(statement["relation"], str(statement["relation"]).replace("_", " "))


def probability_factor(statement: Mapping[str, Any]) -> str:
    """Returns by how much one record can make anything more probable."""
    epsilon = statement["epsilon"]
    factor = rounded_up(math.exp(epsilon)) if epsilon < 10 else f"exp({rounded_up(epsilon)})"
    return f"at most {factor} times as probable, plus {statement['delta']:g}"


def for_one_person(statement: Mapping[str, Any]) -> str:
    """Returns what the epsilon means for one person, computed from the releases of the run or else from its epsilon."""
    odds = statement.get("attack_odds") or attack_odds([(statement["epsilon"], statement["delta"])])
    right, recognised = (rounded_up(100 * value, 3) for value in odds.values())
    question = _QUESTIONS.get(statement["relation"], _QUESTIONS["add_or_remove_one"])
    return (
        f"For one person: suppose that an attacker knows all other records and all settings, sees the weights, and is "
        f"asked {question}. If both answers were equally likely beforehand, the attacker is right at most {right} % of "
        f"the time; tossing a coin is right 50 % of the time. An attacker who wrongly accuses at most 1 of 100 people "
        f"who were not in the data recognises at most {recognised} of 100 who were. Both hold for every attack, and "
        f"for the person whose record is the easiest to recognise."
    )
