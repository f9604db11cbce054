import json
import math
from collections import Counter

import pytest
from scipy import stats

from spectral_dp.accounting import TrialsLaw
from spectral_dp.experiments.tuning.draw import DrawFile, SearchError, draw_trials

LAW = TrialsLaw(10, math.inf)
PLAN = {"what": "a search"}


class RedrawingFile(DrawFile):
    """A mistake: the number of trials is drawn again whenever the search goes on."""

    def trials(self, law, candidates):
        self.path.unlink(missing_ok=True)
        return super().trials(law, candidates)


def is_decided_once(kind, path):
    """Whether a search that goes on, again and again, has the trials that it began with."""
    return len({kind(path, PLAN).trials(LAW, 32) for _ in range(20)}) == 1


def test_a_search_that_goes_on_has_the_same_trials(tmp_path):
    assert is_decided_once(DrawFile, tmp_path / "draw.json")


def test_negative_control_a_number_that_is_drawn_again_is_seen(tmp_path):
    assert not is_decided_once(RedrawingFile, tmp_path / "draw.json")


def test_new_searches_are_independent(tmp_path):
    drawn = {DrawFile(tmp_path / f"{i}.json", PLAN).trials(LAW, 32) for i in range(20)}
    assert len(drawn) == 20


def test_candidates_are_uniform_and_drawn_with_replacement():
    """Without replacement the trials would not be independent, which the theorem needs."""
    searches = [draw_trials(LAW, 8) for _ in range(300)]
    counts = Counter(trial.candidate for trials in searches for trial in trials)
    assert stats.chisquare([counts[i] for i in range(8)]).pvalue > 1e-6
    assert any(len({trial.candidate for trial in trials}) < len(trials) for trials in searches)
    seeds = [trial.seed for trials in searches for trial in trials]
    assert len(set(seeds)) > 0.999 * len(seeds)  # a candidate that is drawn twice is another run


def test_the_number_may_be_zero_for_poisson_only():
    assert min(len(draw_trials(TrialsLaw(1.01, math.inf), 4)) for _ in range(100)) == 0
    assert min(len(draw_trials(TrialsLaw(1.01, 0.0), 4)) for _ in range(100)) == 1


@pytest.mark.parametrize("change", ["fewer", "other plan", "garbage", "no seal"])
def test_a_decision_that_was_changed_is_refused(tmp_path, change):
    path = tmp_path / "draw.json"
    DrawFile(path, PLAN).trials(TrialsLaw(10, 1.0), 32)
    content = json.loads(path.read_text())
    if change == "fewer":
        path.write_text(json.dumps(content | {"trials": content["trials"][:-1]}))
    elif change == "no seal":
        path.write_text(json.dumps({"plan": content["plan"], "trials": []}))
    elif change == "garbage":
        path.write_text("[]")
    with pytest.raises(SearchError, match=r"was changed|is damaged"):
        DrawFile(path, PLAN | ({"more": 1} if change == "other plan" else {})).trials(LAW, 32)
