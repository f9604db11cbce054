"""What is said of the calls that were looked at is true of them."""

import numpy as np
import pytest

from spectral_dp.audit.statistics.coverage import Coverage


def test_shares_and_words():
    coverage = Coverage(calls=1001, steps=1000, claimed_steps=4000)
    assert coverage.share == 0.25
    assert "1001 calls, steps 1 to 1000 of 4000 (25% of the run)" in str(coverage)
    assert "at one call in 100 is found with probability above 0.99, at one in 1,000 with 0.63" in str(coverage)
    assert "(99% of the run)" in str(Coverage(1, 1999, 2000)), "what is not all is not called all"
    values = coverage.to_json()
    assert values["share_of_run"] == 0.25
    assert values["found_at_one_call_in_1000"] == pytest.approx(1 - 0.999**1001)


def test_the_probability_is_that_of_meeting_a_rare_call():
    rng = np.random.default_rng(0)
    met = (rng.random((20_000, 50)) < 1 / 40).any(1).mean()
    assert Coverage(50, 50, 50).found(40) == pytest.approx(met, abs=0.015)
    assert Coverage(1, 1, 1).found(1) == 1
