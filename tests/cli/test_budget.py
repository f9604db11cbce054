"""``spectral-dp budget``: both ways, a table, a picture, JSON for machines, and plain errors."""

import json
import math

import pytest
from typer.testing import CliRunner

from spectral_dp import __version__
from spectral_dp.accounting import calibrate_noise, epsilon
from spectral_dp.cli import app
from spectral_dp.experiments.rounding import rounded_up

MNIST = ["budget", "--samples", "60000", "--batch-size", "1024", "--epochs", "30"]
STEPS = 30 * 59  # ceil(60000 / 1024) = 59


def run(*arguments, wide=True):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"} if wide else None)


def rows(*arguments):
    result = run(*MNIST, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["rows"]


def test_version():
    assert run("--version").stdout.strip() == f"spectral-dp {__version__}"


def test_sigma_from_epsilon():
    (row,) = rows("--epsilon", 2)
    assert row["noise_multiplier"] == calibrate_noise(2.0, 1e-5, 1024 / 60_000, STEPS)
    assert row["epsilon"] <= row["target_epsilon"] == 2


def test_epsilon_from_sigma_and_back():
    (row,) = rows("--noise-multiplier", 1.1)
    assert row["epsilon"] == epsilon(1.1, 1024 / 60_000, STEPS, 1e-5)
    (back,) = rows("--epsilon", row["epsilon"])
    assert back["noise_multiplier"] == pytest.approx(1.1, rel=1e-3)


def test_steps_round_up():
    """Catches floor(N / B): 58 steps an epoch would understate what 59 spend."""
    plan = json.loads(run(*MNIST, "--noise-multiplier", 2, "--json").stdout)["plan"]
    assert plan["steps"] == STEPS
    assert plan["sample_rate"] == 1024 / 60_000


def test_table_over_epsilons_and_both_accountants():
    result = run(*MNIST, "--epsilon", 1, "--epsilon", 3, "--accountant", "both")
    assert result.exit_code == 0
    assert result.stdout.count("pld") == result.stdout.count("rdp") == 2
    for word in ("noise multiplier", "epsilon spent", "1770 steps", "0.017067", "1e-05", "add_or_remove_one"):
        assert word in result.stdout


def test_the_sigma_on_screen_is_private():
    """Catches rounding to nearest: someone will copy the number from the table."""
    table = run(*MNIST, "--epsilon", 2).stdout
    shown = next(line for line in table.splitlines() if "pld" in line).split("│")[3].strip()
    assert epsilon(float(shown), 1024 / 60_000, STEPS, 1e-5) <= 2


@pytest.mark.parametrize("value", [1.62345, 0.99999, 123456.7, 1e-5, 2.0])
def test_rounded_up(value):
    assert value <= float(rounded_up(value)) * (1 + 1e-12)
    assert float(rounded_up(value)) <= value * 1.0011
    assert rounded_up(math.inf) == "inf"


def test_replace_one():
    (replaced,), (added,) = rows("--epsilon", 8, "--relation", "replace_one"), rows("--epsilon", 8)
    assert replaced["noise_multiplier"] < added["noise_multiplier"]


def test_no_noise_is_null_in_json_and_inf_on_screen():
    assert rows("--noise-multiplier", 0)[0]["epsilon"] is None
    assert "inf" in run(*MNIST, "--noise-multiplier", 0).stdout


def test_plot_is_a_png_and_leaves_nothing_else(tmp_path):
    picture = tmp_path / "curve.png"
    result = run(*MNIST, "--epsilon", 2, "--epsilon", 8, "--epochs", 3, "--plot", picture, "--json")
    assert result.exit_code == 0
    json.loads(result.stdout)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]


def test_a_plot_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    """Catches writing in place: a full disk must not cost the previous picture."""
    picture = tmp_path / "curve.png"
    picture.write_bytes(b"old")

    def fails(self, target, **_):
        target.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fails)
    result = run(*MNIST, "--noise-multiplier", 2, "--epochs", 3, "--plot", picture)
    assert result.exit_code == 1
    assert "no space left" in result.stderr
    assert picture.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [picture]


def test_large_delta_warns_on_stderr_only():
    result = run(*MNIST, "--noise-multiplier", 2, "--delta", 1e-3, "--json")
    assert result.exit_code == 0
    assert "warning: delta 0.001 is not below 1/N" in result.stderr
    json.loads(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --epsilon or --noise-multiplier"),
        (["--epsilon", "1", "--noise-multiplier", "1"], "either --epsilon or --noise-multiplier"),
        (["--epsilon", "-1"], "target_epsilon must be a positive number"),
        (["--epsilon", "nan"], "target_epsilon must be a positive number"),
        (["--epsilon", "two"], "Invalid value for '--epsilon'"),
        (["--noise-multiplier", "-2"], "noise_multiplier must be"),
        (["--epsilon", "1", "--delta", "0"], "delta must be strictly between 0 and 1"),
        (["--epsilon", "1", "--batch-size", "60001"], "exceeds --samples"),
        (["--epsilon", "1", "--samples", "0"], "samples"),
        (["--epsilon", "1", "--epochs", "100000000"], "steps must be"),
        (["--epsilon", "1", "--accountant", "gdp"], "gdp"),
        (["--epsilon", "1", "--accountant", "rdp", "--relation", "replace_one"], "pld"),
        (["--epsilon", "1", "--plot", "no/such/place/curve.png"], "no directory"),
    ],
)
def test_bad_input_is_a_clear_error_with_code_2(arguments, message):
    result = run(*MNIST, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
