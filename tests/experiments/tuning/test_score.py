import math
import statistics

from scipy import stats

from spectral_dp.experiments.tuning.score import noisy_accuracy
from spectral_dp.mechanism.noise import SeededNoise


def p_value(noise_multiplier, scale):
    source = SeededNoise(3, reproducibility_over_privacy=True)
    scores = [noisy_accuracy(70, 200, noise_multiplier, source) for _ in range(2000)]
    return stats.kstest([(200 * score - 70) / scale for score in scores], "norm").pvalue


def test_the_noise_is_as_large_as_it_is_accounted_for():
    """Catches noise in units of accuracy rather than of records, and noise divided twice."""
    assert p_value(10.0, 10.0) > 1e-3


def test_negative_control_other_scales_are_rejected():
    assert p_value(10.0, 10.0 * 2 / 3) < 1e-6
    assert p_value(10.0, 10.0 * 3 / 2) < 1e-6


def test_two_scores_of_the_same_trial_differ_and_are_about_right():
    scores = [noisy_accuracy(70, 200, 10.0) for _ in range(50)]
    assert len(set(scores)) > 45
    assert math.isclose(statistics.mean(scores), 0.35, abs_tol=0.05)


def test_the_last_bits_tell_nothing():
    steps = [1024 * 200 * noisy_accuracy(70, 200, 10.0) for _ in range(50)]
    assert all(math.isclose(step, round(step), abs_tol=1e-6) for step in steps)
