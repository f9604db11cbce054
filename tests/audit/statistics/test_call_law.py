"""Every call by itself: honest noise passes as often as stated, one bad call among many does not pass."""

import numpy as np
import pytest
from scipy.stats import binom

from spectral_dp.audit.statistics.call_law import TAILS, CallNoise, judge_calls

WIDTHS = (40, 10)


def summary(z, widths=WIDTHS, silent=None):
    parts = np.split(z, np.cumsum(widths)[:-1], axis=1)
    return CallNoise(
        energies=np.stack([np.square(part).sum(1) for part in parts], axis=1),
        zeros=(np.abs(z) < CallNoise.NEARLY_ZERO).sum(1),
        silent=np.zeros(len(z), dtype=bool) if silent is None else silent,
        widths=np.array(widths),
        compared=z.astype(np.float32),
        shares=np.array(widths),
        beyond=(np.abs(z)[..., None] > TAILS).sum((0, 1)),
    )


def judge(z, confidence=0.999, **options):
    return judge_calls(summary(z, **options), confidence=confidence)


def noise(seed=0, calls=1000):
    return np.random.default_rng(seed).normal(size=(calls, sum(WIDTHS)))


@pytest.mark.parametrize(("calls", "runs"), [(1, 200), (7, 200), (64, 200)])
def test_honest_noise_is_accused_no_more_often_than_stated(calls, runs):
    """Each test alone, too, rejects no more often than it should."""
    laws = [judge(noise(seed, calls), confidence=0.8) for seed in range(runs)]
    assert sum(not law.ok for law in laws) <= binom.ppf(0.9999, runs, 0.2)
    for test in laws[0].p_values:
        level = 0.8 / len(laws[0].p_values)  # corrected p-values: one test's level
        assert sum(law.p_values[test] < 0.8 for law in laws) <= binom.ppf(0.9999, runs, level), test


def test_honest_noise_passes_in_many_calls():
    law = judge(noise())
    assert law.ok
    assert law.scale == pytest.approx(1, abs=0.01)


def _set(where, value):
    def cheat(z):
        z[where] = value if np.isscalar(value) else z[value]
        return z

    return cheat


def _scaled(where, factor):
    def cheat(z):
        z[where] = z[where] * factor
        return z

    return cheat


def _echo(lag, share):
    def cheat(z):
        fresh = z.copy()
        z[lag:] = np.sqrt(1 - share**2) * fresh[lag:] + share * fresh[:-lag]
        return z

    return cheat


FADING = np.linspace(1, 0.9, 1000)[:, None]


@pytest.mark.parametrize(
    ("cheat", "found", "where"),
    [
        (_set(np.s_[999], 0.0), "scale of a call", "call 1000"),
        (_set(np.s_[0], 0.0), "scale of a call", "call 1"),
        (_set(np.s_[500, 40:], 0.0), "scale of a call", "call 501"),
        (_scaled(np.s_[500], 0.4), "scale of a call", "call 501"),
        (_scaled(np.s_[512:], 0.95), "scale of a call", "calls 513"),
        (_scaled(np.s_[:], FADING), "scale of a call", "calls"),
        (_set(np.s_[500, :6], 0.0), "zeros in a call", ""),
        (_set(np.s_[990:991], np.s_[3:4]), "two calls", ""),
        (_set(np.s_[400:800], np.s_[0:400]), "calls at one distance", ""),
        (_set(np.s_[400:800, 40:], np.s_[0:400, 40:]), "calls at one distance", ""),
        (_echo(333, 0.2), "calls at one distance", ""),
        (lambda z: z.clip(-3.2, 3.2), "tails", ""),
        (_set(np.s_[::100, 7], 4.8), "tails", ""),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_every_way_of_cheating_is_found(cheat, found, where, seed):
    law = judge(cheat(noise(seed)))
    assert law.p_values[found] < 1e-3, law
    assert where in law.where


def test_noise_with_the_opposite_sign_is_the_same_noise():
    z = noise()
    z[990] = -z[3]
    assert judge(z).p_values["two calls"] < 1e-6


def test_a_call_that_is_silent_where_no_law_is_known():
    silent = np.arange(1000) == 500
    law = judge(noise(), silent=silent)
    assert not law.ok
    assert "without any noise" in law.verdict


def test_nothing_but_silence_to_judge():
    empty = summary(np.zeros((5, 0)), widths=())
    assert judge_calls(empty, confidence=0.99).ok
