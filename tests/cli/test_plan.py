import json

import pytest
from typer.testing import CliRunner

from spectral_dp.cli import app

FLAGS = ["plan", "--samples", "2000", "--epsilon", "2", "--model", "lenet5", "--epochs", "3", "--accountant", "rdp"]


def run(*arguments):
    return CliRunner().invoke(app, [*FLAGS, "--delta", "1e-4", *map(str, arguments)], env={"COLUMNS": "200"})


def test_it_recommends_says_why_and_draws(tmp_path):
    result = run("--results", tmp_path, "--figure", tmp_path / "plan.png")
    assert result.exit_code == 0, result.output
    for words in ("batch_size", "because", "signal to noise", "not tested", "0 committed results"):
        assert words in result.stdout
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_json(tmp_path):
    value = json.loads(run("--results", tmp_path, "--json").stdout)
    assert {each["setting"] for each in value["recommended"]} >= {"batch_size", "noise_multiplier", "learning_rate"}
    assert len(value["guidelines"]) == 5
    assert value["evidence"]["runs"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--model", "nonsense"], "unknown model"), (["--figure", "no/where.png"], "no directory")],
)
def test_what_cannot_be_planned_is_named(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
