"""Reports: what they say, as text and as JSON."""

import json
import math

from spectral_dp.audit.report import Report, Verdict
from spectral_dp.audit.statistics.coverage import Coverage

HOLDS = Verdict("noise law", "ten numbers", "p-value", 0.01, 0.4, "at least", 0.99, seconds=0.5)
FAILS = Verdict(
    "canaries, many steps", "a run", "epsilon of the run", 2.0, math.inf, "at most", 0.99, seconds=1.0, note="bare"
)
LEFT_OUT = Verdict.left_out("linear map", "no torch")
CLAIM = {"epsilon": 2.0, "delta": 1e-5, "noise_multiplier": 1.0, "relation": "add_or_remove_one"}


def test_one_violation_is_enough():
    assert Report("x", CLAIM, (HOLDS, LEFT_OUT)).ok
    broken = Report("x", CLAIM, (HOLDS, FAILS, LEFT_OUT))
    assert not broken.ok
    assert broken.violations == (FAILS,)
    assert broken.epsilon_lower_bound == math.inf


def test_the_verdict_follows_from_the_numbers():
    for measured, wanted, ok in ((2.2, "at most", True), (2.4, "at most", False), (1.8, "at least", True)):
        assert Verdict("a", "b", "c", 2.0, measured, wanted, slack=0.3).ok is ok
    assert Verdict("a", "b", "c", 2.0, 1.6, "at least", slack=0.3).ok is False
    assert Verdict("a", "b", "c", 2.0, math.nan, "at most").ok is False, "what is not a number proves nothing"
    assert LEFT_OUT.ok is None


def test_audits_that_were_not_made_prove_nothing():
    assert not Report("x", CLAIM, (LEFT_OUT,)).ok


def test_json_is_json():
    """Infinity and NaN are not."""
    values = json.loads(json.dumps(Report("x", CLAIM, (HOLDS, FAILS, LEFT_OUT)).to_json(), allow_nan=False))
    assert values["ok"] is False
    assert values["seconds"] == 1.5
    assert [v["measured"] for v in values["verdicts"]] == [0.4, None, None]
    assert [v["ok"] for v in values["verdicts"]] == [True, False, None]
    assert values["claim"]["epsilon"] == 2


def test_as_text():
    shown = str(Report("x", CLAIM, (HOLDS, FAILS, LEFT_OUT)))
    for words in ("audit of x", "holds", "VIOLATION", "not made", "no torch", "at least 0.01", "does NOT hold", "bare"):
        assert words in shown
    assert "no violation found" in str(Report("x", CLAIM, (HOLDS,)))


def test_what_the_whole_run_spends_is_said_where_the_steps_are_a_part_of_it():
    """Catches a report that gives the epsilon of the training steps for that of the run."""
    report = Report("x", CLAIM | {"total_epsilon": 2.5}, (HOLDS,))
    assert "claimed epsilon 2 at delta 1e-05 (2.5 with the releases beside these steps)" in report.conclusion
    assert "beside" not in Report("x", CLAIM, (HOLDS,)).conclusion


def test_coverage_is_stated():
    report = Report("x", CLAIM, (HOLDS,), coverage=Coverage(1000, 1000, 4000))
    assert "steps 1 to 1000 of 4000 (25% of the run)" in str(report)
    assert report.to_json()["coverage"]["calls"] == 1000
    assert Report("x", CLAIM, (HOLDS,)).to_json()["coverage"] is None
