"""The accounted search: decided once, every trial counts, and nothing but the winner is published."""

import fcntl
import json
import math
import re
import stat

import pytest
from safetensors.torch import load_file

from spectral_dp.accounting import Selection, TrialsLaw
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.tuning import accounted
from spectral_dp.experiments.tuning import draw as drawing
from spectral_dp.experiments.tuning.accounted import run_search
from spectral_dp.experiments.tuning.draw import SearchError
from spectral_dp.experiments.tuning.plan import plan_search
from spectral_dp.experiments.tuning.space import SearchSpace, parse_dimensions

SPACE = SearchSpace(tuple(parse_dimensions(["learning_rate=0.01..2:log"])))


@pytest.fixture
def planned(given):
    return plan_search(given | {"noise_multiplier": 2.0}, SPACE, TrialsLaw(3, 1.0), candidates=4, score_noise=5.0)


@pytest.fixture
def three_trials(monkeypatch):
    """The number of trials is the system's choice; here a test needs to know it."""
    monkeypatch.setattr(TrialsLaw, "draw", lambda self: 3)


def outcomes(out):
    return [json.loads(path.read_text())["score"] for path in sorted((out / "private" / "outcomes").glob("*.json"))]


def test_the_best_of_all_trials_is_released(tmp_path, planned, runner, three_trials):
    out = tmp_path / "search"
    statement = run_search(planned, out, run=runner)
    scores = outcomes(out)
    assert len(scores) == 3
    assert statement["noisy_score"] == max(scores)
    winner = RunDirectory(out / "private" / "trials" / f"trial-{scores.index(max(scores)):03}")
    assert json.loads((out / "released" / "config.json").read_text()) == winner.settings().to_dict()
    ours, theirs = load_file(out / "released" / "weights.safetensors"), load_file(winner.weights)
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_the_statement_is_about_the_selection(tmp_path, planned, runner, three_trials):
    """Catches the winner's own epsilon, which is in its run directory, in the place of that of the choice."""
    run_search(planned, tmp_path / "search", run=runner)
    statement = json.loads((tmp_path / "search" / "released" / "privacy.json").read_text())
    own = RunDirectory(tmp_path / "search" / "private" / "trials" / "trial-000").summary()["epsilon"]
    assert statement["epsilon"] == planned.epsilon > 1.2 * own
    assert Selection.from_dict(statement["selection"]).epsilon(statement["delta"]) == statement["epsilon"]
    page = (tmp_path / "search" / "released" / "privacy.md").read_text()
    assert "Papernot" in page
    assert "geometric with mean 3; the number itself is not released" in page


def test_nothing_else_of_the_trials_is_readable(tmp_path, planned, runner, three_trials, capsys):
    """Catches scores of the losers, the number of trials, or exact accuracies in what is released or shown."""
    out = tmp_path / "search"
    run_search(planned, out, run=runner)
    released = "".join(path.read_text() for path in (out / "released").iterdir() if path.suffix in (".json", ".md"))
    public = released + (out / "search.json").read_text()
    losers = sorted(outcomes(out))[:-1]
    exact = [RunDirectory(path).summary()["heldout_accuracy"] for path in (out / "private" / "trials").glob("trial-*")]
    assert not {*losers, *exact} & {float(text) for text in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", public)}
    assert max(outcomes(out)) in {float(text) for text in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", public)}
    assert {path.name for path in (out / "released").iterdir()} == {
        *("config.json", "weights.safetensors", "privacy.json", "privacy.md")
    }
    assert stat.S_IMODE((out / "private").stat().st_mode) == 0o700
    assert "NOT RELEASED" in (out / "private" / "NOT-RELEASED.txt").read_text()
    assert "trial-0" not in "".join(capsys.readouterr())


def test_a_search_that_goes_on_runs_the_same_trials_once(tmp_path, planned, runner, three_trials):
    """Catches a number that is drawn anew, scores that are drawn anew, and trials that are run again."""
    out = tmp_path / "search"
    runner.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        run_search(planned, out, run=runner)
    decided = (out / "private" / "draw.json").read_text()
    runner.stop_after = None
    statement = run_search(planned, out, run=runner)
    assert runner.started == ["trial-000", "trial-001", "trial-002"]
    assert (out / "private" / "draw.json").read_text() == decided
    scores = outcomes(out)
    assert run_search(planned, out, run=runner) == statement
    assert outcomes(out) == scores
    assert len(runner.started) == 3


def test_negative_control_a_search_that_draws_again_is_seen(tmp_path, planned, runner, monkeypatch):
    """A search that forgets what it drew has other trials than it began with."""
    numbers = iter([1, 4])
    monkeypatch.setattr(TrialsLaw, "draw", lambda self: next(numbers))

    decide = drawing.DrawFile.trials

    def forgetful(self, law, candidates):
        self.path.unlink(missing_ok=True)
        return decide(self, law, candidates)

    monkeypatch.setattr(drawing.DrawFile, "trials", forgetful)
    run_search(planned, tmp_path / "search", run=runner)
    with pytest.raises(SearchError, match="holds another run than the one that was drawn"):
        run_search(planned, tmp_path / "search", run=runner)
    assert len(runner.started) > 1  # the check of the test above fails, too


def test_a_trial_that_fails_counts_and_is_not_run_again(tmp_path, planned, runner, three_trials):
    out = tmp_path / "search"
    runner.fail = {"trial-001": 1}
    runner.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        run_search(planned, out, run=runner)
    runner.fail, runner.stop_after = {}, None
    run_search(planned, out, run=runner)
    assert runner.started == ["trial-000", "trial-001", "trial-002"]
    assert outcomes(out)[1] is None


def test_a_trial_that_an_earlier_search_left_running_has_not_failed(tmp_path, planned, runner, three_trials):
    """A search that is killed leaves its trials running. Catches counting them as failed, because they are locked."""
    out = tmp_path / "search"
    runner.stop_after = 1
    with pytest.raises(KeyboardInterrupt):
        run_search(planned, out, run=runner)
    runner.stop_after = None
    lock = out / "private" / "trials" / "trial-001" / ".lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SearchError, match="still runs"):
            run_search(planned, out, run=runner)
        lock.rename(tmp_path / "aside")  # it was not yet locked when the search looked, but is when the trial begins

        def late(runs, root, *, failed, **_):
            (tmp_path / "aside").rename(lock)
            failed("trial-001", 2)

        with pytest.raises(SearchError, match="was interrupted"):
            run_search(planned, out, run=late)
    run_search(planned, out, run=runner)
    assert None not in outcomes(out)


def test_a_failure_that_was_noted_stays_though_a_result_appears(tmp_path, planned, runner, three_trials):
    """Catches a trial that another process finishes after it counted as failed, and that then gets a score."""

    def run(runs, root, *, failed, **options):
        failed("trial-001", 1)
        runner(runs, root, failed=failed, **options)

    run_search(planned, tmp_path / "search", run=run)
    assert runner.started == ["trial-000", "trial-001", "trial-002"]
    assert [score is None for score in outcomes(tmp_path / "search")] == [False, True, False]


def test_the_scores_have_the_noise_that_the_plan_accounts_for(tmp_path, planned, runner, three_trials, monkeypatch):
    """Catches other noise than the plan's, a rounder number of records, and noise on another figure."""
    drawn = []
    monkeypatch.setattr(accounted, "noisy_accuracy", lambda *given: drawn.append(given) or float(len(drawn)))
    run_search(planned, tmp_path / "search", run=runner)
    runs = [RunDirectory(tmp_path / "search" / "private" / "trials" / f"trial-{i:03}") for i in range(3)]
    right = [round(397 * run.summary()["heldout_accuracy"]) for run in runs]
    assert drawn == [(number, planned.held_out, planned.score_noise) for number in right]
    assert outcomes(tmp_path / "search") == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("code", [-9, 129, 130, 137, 143])
def test_a_trial_that_was_killed_goes_on(tmp_path, planned, runner, three_trials, code):
    """Catches a kill that counts as a failure: then it would decide how many results there are to choose from."""
    out = tmp_path / "search"
    runner.fail = {"trial-001": code}
    with pytest.raises(SearchError, match="was interrupted: the same command goes on"):
        run_search(planned, out, run=runner)
    assert not (out / "released").exists()
    decided = json.loads((out / "private" / "draw.json").read_text())["trials"][1]
    runner.fail = {}
    run_search(planned, out, run=runner)
    assert None not in outcomes(out)
    assert len(outcomes(out)) == 3
    settings = RunDirectory(out / "private" / "trials" / "trial-001").settings()
    assert settings.seed == decided["seed"]
    assert settings.learning_rate == planned.candidates[decided["candidate"]].learning_rate


def test_no_trial_at_all_releases_that_nothing_was_found(tmp_path, given, runner, monkeypatch):
    monkeypatch.setattr(TrialsLaw, "draw", lambda self: 0)
    law = TrialsLaw(3, math.inf)
    search = plan_search(given | {"noise_multiplier": 2.0}, SPACE, law, candidates=4, score_noise=5.0)
    statement = run_search(search, tmp_path / "search", run=runner)
    assert statement["winner"] is None
    assert statement["epsilon"] == search.epsilon > 0
    assert {path.name for path in (tmp_path / "search" / "released").iterdir()} == {"privacy.json", "privacy.md"}


def test_a_trial_that_diverges_counts(tmp_path, given, runner, three_trials):
    space = SearchSpace(tuple(parse_dimensions(["learning_rate=1e30,1e31"])))
    search = plan_search(given | {"noise_multiplier": 2.0}, space, TrialsLaw(3, 1.0), candidates=4, score_noise=5.0)
    assert run_search(search, tmp_path / "search", run=runner)["winner"] is not None
    assert len(outcomes(tmp_path / "search")) == 3


@pytest.mark.parametrize("lost", ["draw.json", "trials/trial-000"])
def test_what_was_begun_and_is_gone_is_refused(tmp_path, planned, runner, three_trials, lost):
    """Catches a search that is rolled back until its result is better."""
    out = tmp_path / "search"
    runner.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        run_search(planned, out, run=runner)
    (out / "private" / lost).rename(tmp_path / "aside")
    with pytest.raises(SearchError, match="is gone"):
        run_search(planned, out, run=runner)


def test_another_search_in_the_same_directory_is_refused(tmp_path, given, planned, runner, three_trials):
    run_search(planned, tmp_path / "search", run=runner)
    other = plan_search(given | {"noise_multiplier": 3.0}, SPACE, TrialsLaw(3, 1.0), candidates=4, score_noise=5.0)
    with pytest.raises(SearchError, match="holds another search"):
        run_search(other, tmp_path / "search", run=runner)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(SearchError, match="holds no search"):
        run_search(planned, tmp_path / "full", run=runner)


def test_a_trial_that_spent_more_than_planned_releases_nothing(tmp_path, given, planned, runner, three_trials):
    """Catches an engine that takes more steps, or adds less noise, than the search accounts for."""
    louder = plan_search(given | {"noise_multiplier": 9.0}, SPACE, TrialsLaw(3, 1.0), candidates=4, score_noise=50.0)
    claims_less = accounted.replace(planned, selection=louder.selection)
    with pytest.raises(SearchError, match="spent more than the search accounts for"):
        run_search(claims_less, tmp_path / "search", run=runner)
    assert not (tmp_path / "search" / "released").exists()


def test_a_trial_that_is_not_private_by_its_own_word_releases_nothing(tmp_path, planned, runner, three_trials):
    """Catches what the ledger does not know of: features that were made from the records, noise from a seed."""

    def tampering(runs, root, **options):
        runner(runs, root, **options)
        path = root / "trial-001" / "privacy.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"private": False}))

    with pytest.raises(SearchError, match="says that it is not private"):
        run_search(planned, tmp_path / "search", run=tampering)
    assert not (tmp_path / "search" / "released").exists()


def test_one_process_at_a_time(tmp_path, planned, three_trials):
    def nested(runs, root, *, jobs, show, failed):
        run_search(planned, tmp_path / "search", run=nested)

    with pytest.raises(SearchError, match="another process works on the search"):
        run_search(planned, tmp_path / "search", run=nested)
