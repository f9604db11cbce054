import json
from dataclasses import replace

import pytest

from spectral_dp.accounting import Selection, TrialsLaw
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.tuning.plan import plan_search
from spectral_dp.experiments.tuning.release import Winner, publish, selection_statement
from spectral_dp.experiments.tuning.space import SearchSpace, parse_dimensions

SPACE = SearchSpace(tuple(parse_dimensions(["learning_rate=0.01..2:log"])))


@pytest.fixture
def planned(given):
    return plan_search(given | {"noise_multiplier": 2.0}, SPACE, TrialsLaw(3, 1.0), candidates=2, score_noise=5.0)


def says_its_cost(statement):
    """Whether a statement claims no less than its own description of the search comes to."""
    return statement["epsilon"] >= Selection.from_dict(statement["selection"]).epsilon(statement["delta"])


def test_the_statement_can_be_checked_by_its_reader(planned):
    statement = json.loads(json.dumps(selection_statement(planned, None)))
    assert says_its_cost(statement)
    assert statement["noise_of_the_score"] == 5.0 / 397
    assert "NOT" in statement["epsilon_of_one_run_is"]


def test_negative_control_the_cost_of_one_run_is_seen(planned):
    statement = selection_statement(planned, None)
    assert not says_its_cost(statement | {"epsilon": statement["epsilon_of_one_run"]})


def test_a_delta_that_protects_nobody_is_said(given):
    search = plan_search(
        given | {"noise_multiplier": 2.0, "delta": 0.01}, SPACE, TrialsLaw(3, 1.0), candidates=2, score_noise=5.0
    )
    statement = selection_statement(search, None)
    assert statement["private"] is False
    assert "protects nobody" in statement["warnings"][0]


def test_what_is_published_tells_no_time(tmp_path, planned):
    """Catches times of files that, with that of the plan, tell how long the search took: about how many trials."""
    (tmp_path / "run").mkdir()
    run = RunDirectory(tmp_path / "run")
    run.weights.write_bytes(b"weights")
    publish(planned, Winner(planned.candidates[0], 0.5, run), tmp_path / "released")
    times = {path.stat().st_mtime for path in (tmp_path / "released", *(tmp_path / "released").iterdir())}
    assert times == {315_619_200}


def test_the_statement_says_what_is_assumed_of_every_candidate(planned):
    """Catches a statement that leaves out where the features came from, of the winner or of those that lost."""
    read = replace(planned.candidates[1], features="patches", feature_options={"prior": "dead-leaves"})
    statement = selection_statement(replace(planned, candidates=(planned.candidates[0], read)), None)
    assert any("generated images" in assumption for assumption in statement["assumptions"])
    assert not any("images" in assumption for assumption in selection_statement(planned, None)["assumptions"])


def test_what_was_published_stays(tmp_path, planned):
    (tmp_path / "run").mkdir()
    run = RunDirectory(tmp_path / "run")
    run.weights.write_bytes(b"weights")
    publish(planned, Winner(planned.candidates[0], 0.5, run), tmp_path / "released")
    before = {path.name: path.read_bytes() for path in (tmp_path / "released").iterdir()}
    publish(planned, Winner(planned.candidates[1], 0.9, run), tmp_path / "released")
    assert {path.name: path.read_bytes() for path in (tmp_path / "released").iterdir()} == before
    assert before["weights.safetensors"] == b"weights"
