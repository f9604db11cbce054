"""``spectral-dp audit``: a table, JSON, a picture, plain errors, and an exit code that says what was found."""

import json

import pytest
import typer
from torch import nn
from typer.testing import CliRunner

from spectral_dp.audit import Effort
from spectral_dp.cli.audit import VIOLATION, audit_command
from spectral_dp.models import registry

SOUND = """
import torch
def release(gradients):
    norms = gradients.norm(dim=1, keepdim=True)
    factors = (1 / norms.clamp(min=1e-12)).clamp(max=1)
    clipped = torch.where(norms.isfinite(), gradients * factors, 0)
    return (clipped.sum(0) + 1.1 * torch.randn(gradients.shape[1])) / 8
def bare(gradients):
    released = release(gradients)
    released[-1] = torch.nan_to_num(gradients, 0, 0, 0).clamp(-0.1, 0.1).sum(0)[-1]
    return released
"""
CLAIM = ["--noise-multiplier", 1.1, "--batch-size", 8, "--samples", 40, "--epochs", 2, "--delta", 1e-3]


def tiny(input_shape, classes):
    return nn.Sequential(nn.Conv2d(input_shape[0], 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, classes))


@pytest.fixture(autouse=True)
def _light(monkeypatch, few_batches):
    """The command as it is, looking at less, and at a network for digits of 8 x 8 pixels."""
    monkeypatch.setitem(registry._REGISTRY, "tiny", registry.Entry(tiny))
    light = Effort(1, canary_blocks=2, per_block=8, scores=600, run_scores=20, steps=6, noise_steps=6, calls=40)
    monkeypatch.setattr("spectral_dp.audit.FAST", light)


@pytest.fixture
def mine(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOUND)
    return file


def run(*arguments):
    app = typer.Typer()
    app.command()(audit_command)
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def test_a_sound_function_passes(mine, tmp_path):
    result = run("--target", f"{mine}:release", *CLAIM, "--out", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    for words in ("linear map", "canaries, one step", "no violation found", "mine.py:release"):
        assert words in result.stdout
    assert "noise was looked at in 50 calls, steps 1 to 10 of 10 (100% of the run)" in result.stdout
    assert "done" in result.stderr, "progress goes to stderr"
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["ok"] is True
    assert written["coverage"]["share_of_run"] == 1
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_violation_is_exit_code_1(mine):
    result = run("--target", f"{mine}:bare", *CLAIM, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    linear_map = next(v for v in report["verdicts"] if v["audit"] == "linear map")
    assert linear_map["measured"] == 0
    assert "coordinate 63 of coordinates" in linear_map["details"]["directions_without_noise"]["gradient"]


def test_the_table_shows_what_failed(mine):
    shown = run("--target", f"{mine}:bare", *CLAIM, "--quiet").stdout
    for words in ("VIOLATION", "holds", "at least", "exact", "coordinate 63", "the claim does NOT hold"):
        assert words in shown


@pytest.mark.parametrize("target", ["spectral", "opacus"])
def test_a_configuration(target):
    if target == "opacus":
        pytest.importorskip("opacus")
    ratio = 0.5 if target == "spectral" else 0
    result = run(
        "--target", target, "--model", "tiny", "--conv-ratio", ratio, *CLAIM, "--confidence", 0.999999, "--json"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["target"] == f"tiny ({target})"
    assert {v["audit"] for v in report["verdicts"]} >= {"neighbours", "noise law", "sampling", "canaries, one run"}


def test_a_run_with_a_wrong_statement(tmp_path):
    """Its mechanism is sound, but it spent more than it states."""
    from spectral_dp.experiments.settings import Settings

    settings = Settings.from_dict({"model": "tiny", "batch_size": 64, "delta": 1e-4}).resolved()
    (tmp_path / "config.json").write_text(json.dumps(settings.to_dict()))
    facts = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 20, "epsilon": 0.5}
    (tmp_path / "privacy.json").write_text(json.dumps(facts))
    result = run(tmp_path, "--confidence", 0.999999, "--json")
    assert result.exit_code == 1
    assert [v["audit"] for v in json.loads(result.stdout)["verdicts"] if v["ok"] is False] == ["accounting"]


STATISTICS = ["--model", "scatter-linear", "--feature-norm", "private", "--feature-noise-multiplier", 2]


def test_the_release_of_statistics_is_part_of_the_report():
    """Catches a report that leaves the statistics out of what the run spends."""
    result = run(*STATISTICS, "--method", "dpsgd", *CLAIM, "--confidence", 0.999999, "--json")
    assert result.exit_code == 0, result.output
    assert "NaN" not in result.stderr
    report = json.loads(result.stdout)
    assert report["normalisation"]["ok"]
    alone, others = report["claim"]["epsilon"], report["normalisation"]["claim"]["epsilon"]
    assert max(alone, others) < report["claim"]["total_epsilon"] < alone + others


def test_a_violation_by_the_statistics_alone_is_one(monkeypatch):
    """Catches JSON that says "ok" of a run because its training steps are."""
    from tests.support.broken_statistics import without_charge

    from spectral_dp.experiments import audit_target

    sound = audit_target.statistics_target
    monkeypatch.setattr(audit_target, "statistics_target", lambda settings: sound(settings, without_charge))
    result = run(*STATISTICS, "--method", "dpsgd", *CLAIM, "--confidence", 0.999999, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is report["normalisation"]["ok"] is False


def test_several_processes_are_the_same_command(monkeypatch):
    asked = []
    monkeypatch.setattr("spectral_dp.cli.ranks.run_ranks", lambda *given: asked.append(given) or VIOLATION)
    monkeypatch.setattr("sys.argv", ["spectral-dp", "audit", "--processes", "2"])
    result = run("--model", "tiny", *CLAIM, "--processes", 2)
    assert result.exit_code == VIOLATION
    ((command, processes),) = asked
    assert (command[-4:], processes) == (["spectral_dp", "audit", "--processes", "2"], 2)


@pytest.mark.parametrize(("mistake", "code"), [("none", 0), ("one share only", 1)])
def test_each_of_several_processes_makes_the_audit_and_the_first_tells_of_it(processes, mistake, code):
    arguments = [*map(str, CLAIM), "--json"]
    (first, told), (second, silence) = processes.run(
        2, "tests.support.group_doubles:command", arguments, mistake, timeout=60.0
    )
    assert (first, second, silence) == (code, code, "")
    report = json.loads(told)
    assert report["target"] == "tiny (spectral), 2 processes"
    assert report["ok"] is (code == 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "{mine}:release", "--processes", 2], "is audited in one process: leave --processes out"),
        (["--method", "opacus", "--processes", 2], "method opacus trains in one process"),
        (["--target", "elsewhere"], "spectral, opacus or FILE.py:NAME"),
        (["--target", "absent.py:f"], "there is no file absent.py"),
        (["--input-shape", "28x28"], "C,H,W"),
        (["--method", "nonprivate"], "claims no privacy"),
        (["--plot", "/nowhere/a.png"], "there is no directory"),
        (["nowhere"], "holds no run"),
        (["nowhere", "--model", "lenet5"], "leave the other settings out"),
        (["--noise-multiplier", 0], "must be positive to be audited"),
        (["--target", "{mine}:release", "--returns", "both"], "not one of 'mean', 'sum'"),
    ],
)
def test_plain_errors(arguments, message, mine):
    result = run(*(str(a).format(mine=mine) for a in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
