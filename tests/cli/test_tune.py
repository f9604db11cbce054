"""``spectral-dp tune``: both ways, what they print, and what they refuse."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spectral_dp.cli import app
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.tuning import open_search

NETWORK = """
from torch import nn
def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
FLAGS = (
    "--model tune_test_network:net --method dpsgd --train-size 100 --validation-size 300 --batch-size 50 --epochs 1 "
    "--noise-multiplier 3 --delta 1e-4 --accountant rdp --search learning_rate=0.1..1:log"
)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    (tmp_path / "tune_test_network.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "200"})


def test_an_accounted_search_in_processes_of_its_own(monkeypatch):
    monkeypatch.setattr("spectral_dp.accounting.TrialsLaw.draw", lambda self: 1)
    result = run(*FLAGS.split(), "--trials", "2", "--candidates", "2", "--out", "search")
    assert result.exit_code == 0, result.output
    assert "epsilon of the search" in result.stdout
    assert "the number itself is not released" in result.stdout
    assert "trial-000" not in result.output
    statement = json.loads(Path("search/released/privacy.json").read_text())
    assert statement["epsilon"] > RunDirectory("search/private/trials/trial-000").summary()["epsilon"]
    again = run(*FLAGS.split(), "--trials", "2", "--candidates", "2", "--out", "search", "--json")
    assert json.loads(again.stdout)["noisy_score"] == statement["noisy_score"]


@pytest.mark.parametrize(("way", "records"), [("public-data", "public"), ("none", "private")])
def test_a_search_that_is_not_accounted_for_says_so(monkeypatch, tmp_path, way, records):
    asked = {}

    def made_up(candidates, searched, out, **options):
        asked.update(options, candidates=candidates)
        line = {"trial": 0, "heldout_accuracy": 0.5, "settings": {"learning_rate": 0.25}}
        return {"statement": open_search.STATEMENTS[options["records"]], "ranking": [line]}

    monkeypatch.setattr(open_search, "run_open_search", made_up)
    result = run(*FLAGS.split(), "--accounting", way, "--trials", "4", "--hours", "0.5", "--out", "search")
    assert result.exit_code == 0, result.output
    assert (asked["records"], asked["seconds"], len(asked["candidates"])) == (records, 1800.0, 4)
    assert "NOT accounted for" in result.stdout
    assert "NOT ACCOUNTED" in " ".join(result.stdout.split())


def test_ranges_from_a_file(monkeypatch, tmp_path):
    found = {}
    monkeypatch.setattr(
        "spectral_dp.experiments.tuning.plan.plan_search",
        lambda given, space, law, **_: found.update(space=space) or 1 / 0,
    )
    (tmp_path / "search.toml").write_text("epochs = 3\n[search]\nbatch_size = [64, 128]\n")
    with pytest.raises(ZeroDivisionError):
        raise run("--config", "search.toml", "--search", "momentum=0..0.9").exception
    assert [dimension.name for dimension in found["space"].dimensions] == ["batch_size", "momentum"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to search"),
        (["--search", "seed=1,2"], "no setting that can be searched"),
        (["--search", "epochs=1,2"], "give validation_size"),
        (["--search", "epochs=1,2", "--hours", "1"], "leave --hours out"),
        (["--search", "epochs=1,2", "--trials", "1"], "must be above 1"),
        (["--search", "epochs=1,2", "--accounting", "none"], "not chosen on the test set"),
    ],
)
def test_what_cannot_be_searched_is_named(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
