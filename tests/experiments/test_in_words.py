"""A statement in plain words: its numbers follow from the releases, and err on the safe side."""

import math
import re

import pytest

from spectral_dp.accounting import Ledger
from spectral_dp.accounting.membership import guarantees_of, largest_guess_accuracy
from spectral_dp.experiments import in_words

STATEMENT = {"epsilon": 2.0, "delta": 1e-5, "relation": "add_or_remove_one"}


def numbers(text):
    return [float(found) for found in re.findall(r"at most ([0-9.]+)", text) if found != "1"]


def test_from_epsilon_alone():
    right, recognised = numbers(in_words.for_one_person(STATEMENT))
    assert right == pytest.approx(88.1)
    assert right >= 100 * largest_guess_accuracy([(2.0, 1e-5)])
    assert recognised == pytest.approx(7.40, abs=0.011)  # exp(2) of a hundredth


def test_the_releases_themselves_say_less():
    """A Gaussian at (2, 1e-5) gives its attackers less than the worst mechanism at (2, 1e-5) could."""
    ledger = Ledger()
    ledger.record(1.626, 1024 / 60000, 1770)
    odds = in_words.attack_odds(guarantees_of(ledger))
    right, recognised = numbers(in_words.for_one_person(STATEMENT | {"attack_odds": odds}))
    assert right == pytest.approx(100 * odds["guess_accuracy"], abs=0.1)
    assert 50 < right < 70
    assert 1 < recognised < 7.4


def test_the_question_follows_the_neighbours():
    assert "whether one certain person's record was used" in in_words.for_one_person(STATEMENT)
    assert "which of two records" in in_words.for_one_person(STATEMENT | {"relation": "replace_one"})
    assert "replacing one record by another" in in_words.promise(STATEMENT | {"relation": "replace_one"})


def test_the_promise_and_its_factor_are_rounded_up():
    assert in_words.promise(STATEMENT | {"epsilon": 1.99991}).startswith("(2, 1e-05)-differential privacy")
    factor = float(re.search(r"most ([0-9.]+) times", in_words.probability_factor(STATEMENT))[1])
    assert math.exp(2) <= factor < 1.001 * math.exp(2)
    assert "exp(12)" in in_words.probability_factor(STATEMENT | {"epsilon": 12.0})
