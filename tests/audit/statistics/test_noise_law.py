"""The law of the noise: honest noise passes as often as stated, every way of cheating is named."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

from spectral_dp.audit.statistics.noise_law import judge_noise

STD = 0.7
LAYERS = (slice(0, 30), slice(30, 50))


def noise(seed=0, shape=(40, 50)):
    return np.random.default_rng(seed).normal(0, STD, shape)


def judge(residuals, blocks=LAYERS, confidence=0.999, claimed_std=STD):
    return judge_noise(residuals / claimed_std, confidence=confidence, blocks=blocks or ())


@pytest.mark.parametrize(("shape", "runs"), [((1, 60), 300), ((2, 31), 300), ((40, 50), 300)])
def test_honest_noise_is_accused_no_more_often_than_stated(shape, runs):
    """Each test alone, too, rejects about as often as it should: none is there for show."""
    blocks = [slice(0, shape[1] // 2), slice(shape[1] // 2, shape[1])]
    rng = np.random.default_rng(0)
    laws = [judge(rng.normal(0, STD, shape), blocks, confidence=0.8) for _ in range(runs)]
    accused = sum(not law.ok for law in laws)
    assert 0.25 * 0.2 * runs < accused <= binom.ppf(0.9999, runs, 0.2)
    tests = laws[0].p_values
    for test in tests:
        rejected = sum(law.p_values[test] < 0.8 for law in laws)  # corrected p-values: one test's level is 0.8 / tests
        expected = 0.8 / len(tests) * runs
        assert rejected <= expected + 4 * math.sqrt(expected), test
        assert test == "zeros" or rejected > 0.3 * expected, test


def test_honest_noise_passes():
    law = judge(noise())
    assert law.ok
    assert law.verdict == "ok"
    assert law.reasons == ()
    assert law.scale == pytest.approx(1, abs=0.05)


def _copied(target, source):
    def cheat(z):
        z[target] = z[source]
        return z

    return cheat


def _scaled(where, factor):
    def cheat(z):
        z[where] *= factor
        return z

    return cheat


def _autoregressive(z):
    for t in range(1, len(z)):
        z[t] = 0.3 * z[t - 1] + math.sqrt(1 - 0.3**2) * z[t]
    return z


def _smeared(z):
    return (z + np.roll(z, 1, axis=1)) / math.sqrt(2)


def _laplace(z):
    return np.random.default_rng(1).laplace(0, STD / math.sqrt(2), z.shape)


@pytest.mark.parametrize(
    ("cheat", "found"),
    [
        (_scaled(np.s_[:], 2 / 3), "scale"),
        (_scaled(np.s_[:], 0.9), "scale"),
        (_scaled(np.s_[:], 3 / 2), "scale"),
        (_scaled(np.s_[:, 49], 0.3), "coordinate scale"),
        (_scaled(np.s_[7], 0.5), "step scale"),
        (_laplace, "shape"),
        (_scaled(np.s_[:, 49], 0.0), "zeros"),
        (_scaled(np.s_[7, 48:50], 0.0), "zeros"),
        (_copied(7, 6), "two steps"),
        (_copied(39, 0), "two steps"),
        (_autoregressive, "neighbouring steps"),
        (_copied(np.s_[:, 31], np.s_[:, 4]), "two coordinates"),
        (_smeared, "neighbouring coordinates"),
        (_copied(np.s_[:, 30:50], np.s_[:, 0:20]), "two blocks"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_way_of_cheating_is_found(cheat, found, seed):
    law = judge(cheat(noise(seed)))
    assert not law.ok
    assert law.p_values[found] < 1e-3, law.verdict


def test_noise_with_the_opposite_sign_is_the_same_noise():
    z = noise()
    z[9] = -z[2]
    z[:, 30:50] = -z[:, 0:20]
    law = judge(z)
    assert max(law.p_values["two steps"], law.p_values["two blocks"]) < 1e-6


def test_layers_sharing_noise_show_in_a_single_step():
    """A generator started again for each layer, of any size."""
    z = noise(shape=(1, 50))
    z[:, 30:50] = z[:, 0:20]
    assert not judge(z).ok
    assert judge(z, blocks=None).ok, "without the layout one step cannot tell"


def test_reasons_say_what_is_wrong():
    z = 0.8 * noise()
    z[7] = z[3]
    verdict = judge(z).verdict
    assert "the deviation is 0.8" in verdict
    assert "two steps repeat" in verdict
    assert "blocks" not in verdict


def test_one_deviation_per_coordinate():
    """Layers may have noise of their own scale."""
    scales = np.linspace(0.5, 2.0, 50)
    z = scales * noise()
    assert judge(z, claimed_std=STD * scales).ok
    assert not judge(z).ok


def test_tensors_and_arrays_are_judged_alike():
    z = noise()
    tensor = torch.from_numpy(z.copy()).requires_grad_()
    z.flags.writeable = False
    assert judge(tensor) == judge(z)
    assert judge(tensor.float()).ok


def test_more_coordinates_than_are_compared_pairwise():
    """Of many coordinates a random choice is compared: it finds noise that is tiled."""
    tile = noise(shape=(30, 1500))
    assert judge(np.concatenate([tile, tile], axis=1), blocks=None).p_values["two coordinates"] < 1e-6
    assert judge(noise(1, shape=(30, 3000)), blocks=None).ok


@pytest.mark.parametrize(
    ("residuals", "message"),
    [
        (np.ones(3), r"\(steps, coordinates\), not empty; got \(3,\)"),
        (np.ones((0, 3)), "not empty"),
        (np.array([[1.0, np.nan]]), "1 of 2 residuals are not finite"),
    ],
)
def test_bad_values_are_refused(residuals, message):
    with pytest.raises(ValueError, match=message):
        judge(residuals, None)


def test_a_block_beyond_the_coordinates_is_refused():
    """It would be compared with nothing."""
    with pytest.raises(ValueError, match=r"\[30, 0\] coordinates"):
        judge(noise(), blocks=[slice(0, 30), slice(50, 60)])


def test_a_confidence_that_is_none_is_refused():
    with pytest.raises(ValueError, match="confidence must be"):
        judge(noise(), confidence=1.0)
