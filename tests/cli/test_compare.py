"""``spectral-dp compare``: which configurations, what it prints; the runs themselves are made up."""

import json

import pytest
from tests.support.fabricated_runs import fabricate
from typer.testing import CliRunner

from spectral_dp.cli import app
from spectral_dp.experiments.processes import RunsFailed


@pytest.fixture
def asked(monkeypatch):
    """The runs that were asked for, in place of making them."""
    runs = {}

    def run_all(given, root, **_):
        runs.update(given)
        for i, (name, settings) in enumerate(given.items()):
            fabricate(root / name, accuracy=0.9 + 0.01 * i, **settings.to_dict())

    monkeypatch.setattr("spectral_dp.experiments.processes.run_all", run_all)
    return runs


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "220"})


def test_the_usual_three_with_the_same_seeds(tmp_path, asked):
    result = run("--seeds", 2, "--seed", 5, "--epsilon", 3, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    methods = [(settings.method, settings.seed, settings.reproducible) for settings in asked.values()]
    assert methods == [(method, seed, True) for seed in (5, 6) for method in ("nonprivate", "dpsgd", "spectral")]
    assert "difference" in result.stdout
    assert "2 seeds" in result.stdout


def test_configurations_of_ones_own(tmp_path, asked):
    arms = ["--arm", "opacus", "--arm", "ρ: method=spectral, linear_ratio=0.5, model=lenet5"]
    result = run(*arms, "--seeds", 1, "--no-reproducible", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    opacus, ours = asked.values()
    assert (opacus.method, opacus.reproducible) == ("opacus", False)
    assert (ours.method, ours.linear_ratio, ours.model) == ("spectral", 0.5, "lenet5")


def test_configurations_from_a_file(tmp_path, asked):
    (tmp_path / "arms.toml").write_text('epochs = 3\n[arms.A]\nmethod = "dpsgd"\n[arms.B]\nconv_ratio = 0.5\n')
    result = run("--config", tmp_path / "arms.toml", "--seeds", 1, "--out", tmp_path / "out", "--json")
    assert json.loads(result.stdout)["baseline"] == "A"
    assert [(s.method, s.epochs, s.conv_ratio) for s in asked.values()] == [("dpsgd", 3, 0.0), ("spectral", 3, 0.5)]


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ("sgd", "configuration 'sgd': method must be one of spectral"),
        ("a: epochs", "write settings as NAME=VALUE"),
        ("a: epoch=3", "configuration 'a' has unknown settings epoch"),
        ("a: seed=3", "share their seeds"),
    ],
)
def test_bad_configurations_are_named(tmp_path, asked, arm, message):
    result = run("--arm", arm, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_label_given_twice_is_refused(tmp_path, asked):
    result = run("--arm", "a: epochs=1", "--arm", "a: epochs=2", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "two configurations are called 'a'" in result.stderr


def test_tables_in_a_configuration(tmp_path, asked):
    result = run("--arm", "a: layer_ratios={fc1=0.5, fc2=0.25}, epochs=2", "--seeds", 1, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    (settings,) = asked.values()
    assert settings.layer_ratios == {"fc1": 0.5, "fc2": 0.25}


def test_failed_runs_are_exit_code_1(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RunsFailed("1 of 3 runs failed, the others are kept")

    monkeypatch.setattr("spectral_dp.experiments.processes.run_all", fails)
    result = run("--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "the others are kept" in result.stderr
