"""``spectral-dp report``: a page, or one line that says why there is none."""

import pytest
import typer
from tests.support.fabricated_runs import fabricate
from typer.testing import CliRunner

from spectral_dp.cli.report import report_command

app = typer.Typer()
app.command()(report_command)


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch):
    """They take time, and are tested where they are drawn."""
    monkeypatch.setattr("spectral_dp.experiments.figures.as_svg", lambda figure, **_: "<svg></svg>")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_writes_a_page_and_says_where(tmp_path, monkeypatch):
    fabricate(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    result = run("run")
    assert result.exit_code == 0, result.output
    size = (tmp_path / "report.html").stat().st_size
    assert result.stdout == f"report.html ({size / 1000:,.0f} kB)\n"


def test_replaces_an_old_page(tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    runs = [fabricate(tmp_path / name, seed=seed).path for seed, name in enumerate("ab")]
    assert run(*runs, "--out", target).exit_code == 0
    assert "(n = 2)" in target.read_text()


@pytest.mark.parametrize(("flags", "is_marked"), [([], True), (["--public"], False)])
def test_public(tmp_path, flags, is_marked):
    source, target = fabricate(tmp_path / "run", unsafe_diagnostics=True).path, tmp_path / "page.html"
    assert run(source, "--out", target, *flags).exit_code == 0
    assert ('class="box unsafe"' in target.read_text()) == is_marked


def test_open(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    source, target = fabricate(tmp_path / "run").path, tmp_path / "page.html"
    run(source, "--out", target)
    assert opened == []
    run(source, "--out", target, "--open")
    assert opened == [target.as_uri()]


def damaged(tmp_path):
    source = fabricate(tmp_path / "run")
    source.metrics_file.write_text("nonsense\n")
    return source.path


@pytest.mark.parametrize(
    ("source", "out", "code", "message"),
    [
        (lambda tmp_path: tmp_path / "nowhere", "page.html", 2, "nowhere holds no run"),
        (damaged, "page.html", 2, "metrics.jsonl is damaged"),
        (lambda tmp_path: fabricate(tmp_path / "run").path, "no/such/page.html", 1, "there is no directory"),
        (lambda tmp_path: fabricate(tmp_path / "run").path, "run", 1, "run"),
    ],
)
def test_what_went_wrong_is_one_line(tmp_path, source, out, code, message):
    path = source(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = run(path, "--out", tmp_path / out)
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_must_be_named():
    assert run().exit_code == 2
