"""``spectral-dp reproduce``: runs what is missing, reports what is there, and says plainly what it cannot do."""

import json
import shutil

import pytest
import typer
from tests.support.fabricated_runs import fabricate
from typer.testing import CliRunner

from spectral_dp.cli.reproduce import reproduce_command
from spectral_dp.experiments import processes
from spectral_dp.experiments.recipe import names
from spectral_dp.experiments.run_directory import RunDirectory

RECIPE = """
title = "Tiny"
source = "Table 0"
rows = [{ label = "DP-SGD", set = { method = "dpsgd" } }, { label = "Spectral-DP", set = { linear_ratio = 0.5 } }]
columns = [{ label = "Model1", set = { epochs = 1, train_size = 64, batch_size = 32, block_size = 8 } }]
scales.smoke.seeds = 1
[[panels]]
title = "First"
origin = "paper"
"""


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tiny.toml").write_text(RECIPE)
    return tmp_path


class Training:
    """Stands in for training: as :func:`spectral_dp.experiments.processes.run_all`, without the processes."""

    def __init__(self):
        self.trained, self.failing, self.interrupted_after = [], (), None

    def __call__(self, asked, root, *, jobs, show):
        failed = []
        for name, settings in asked.items():
            if RunDirectory(root / name).is_finished:
                continue
            if len(self.trained) == self.interrupted_after:
                raise KeyboardInterrupt
            if settings.method in self.failing:
                failed.append(name)
                continue
            fabricate(root / name, accuracy=0.75, **settings.to_dict())
            self.trained.append(settings.method)
        if failed:
            raise processes.RunsFailed(f"{len(failed)} runs failed: {failed}")


@pytest.fixture
def trainer(monkeypatch):
    fake = Training()
    monkeypatch.setattr(processes, "run_all", fake)
    return fake


def run(*arguments):
    app = typer.Typer()
    app.command()(reproduce_command)
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def report(directory, name="tiny-smoke"):
    return (directory / "results" / name / "README.md").read_text()


def test_trains_and_reports(trainer, directory):
    result = run("tiny.toml")
    assert result.exit_code == 0, result.output
    assert "tiny: results/tiny-smoke/README.md" in result.output
    assert trainer.trained == ["dpsgd", "spectral"]
    assert report(directory).count("| 75.00 |") == 2
    assert "    spectral-dp reproduce tiny.toml --scale smoke\n" in report(directory)
    assert len(list((directory / "runs" / "reproduce").iterdir())) == 2
    assert {path.name for path in (directory / "results" / "tiny-smoke").iterdir()} == {
        "README.md",
        "results.json",
        "panel1.png",
    }


def test_finished_runs_are_not_run_again(trainer):
    run("tiny.toml")
    run("tiny.toml", "--seeds", 2)
    assert trainer.trained == ["dpsgd", "spectral"] * 2  # the second time, the second seed alone


class TestRecords:
    """What a clone of the repository has: records of runs beside the reports, and no run directories."""

    @pytest.fixture(autouse=True)
    def recorded(self, trainer, directory):
        run("tiny.toml")
        shutil.rmtree(directory / "runs")
        trainer.trained.clear()

    def test_recorded_runs_are_not_run_again(self, trainer, directory):
        result = run("tiny.toml", "--seeds", 2)
        assert "tiny: 2 of 4 runs are taken from the records in results/runs" in result.output
        assert trainer.trained == ["dpsgd", "spectral"]  # the second seed alone
        assert report(directory).count("| 75.00 ± 0.00 |") == 2

    def test_with_all_of_them_nothing_is_run_and_no_data_are_needed(self, trainer, directory, monkeypatch):
        monkeypatch.setattr("spectral_dp.experiments.grid.load_records", lambda _: pytest.fail("no data are needed"))
        result = run("tiny.toml")
        assert result.exit_code == 0, result.output
        assert "2 of 2 runs are taken from the records" in result.output
        assert trainer.trained == []
        assert report(directory).count("| 75.00 |") == 2

    def test_reports_elsewhere_run_everything(self, trainer):
        """Catches records that keep a user from repeating the runs."""
        assert "records" not in run("tiny.toml", "--out", "there").output
        assert trainer.trained == ["dpsgd", "spectral"]

    def test_a_record_of_other_settings_does_not_count(self, trainer, directory):
        (record,) = (directory / "results" / "runs").glob("*-dpsgd-*")
        settings = RunDirectory(record).settings().to_dict() | {"momentum": 0.9}
        (record / "config.json").write_text(json.dumps(settings))
        assert "1 of 2 runs are taken from the records" in run("tiny.toml").output
        assert trainer.trained == ["dpsgd"]


def test_seeds_are_part_of_the_command(trainer, directory):
    run("tiny.toml", "--seeds", 2)
    assert "--scale smoke --seeds 2\n" in report(directory)
    assert report(directory).count("| 75.00 ± 0.00 |") == 2


def test_a_failure_leaves_the_others_and_the_report(trainer, directory):
    trainer.failing = ("dpsgd",)
    result = run("tiny.toml")
    assert result.exit_code == 1
    assert "error: 1 runs failed" in result.stderr
    assert "| DP-SGD | Model1 | not run |" in report(directory)
    assert "| Spectral-DP | Model1 | 75.00 |" in report(directory)
    trainer.failing = ()
    assert run("tiny.toml").exit_code == 0
    assert trainer.trained == ["spectral", "dpsgd"]


def test_a_failure_in_one_recipe_does_not_stop_the_next(trainer, directory):
    (directory / "next.toml").write_text(RECIPE.replace("dpsgd", "nonprivate"))
    trainer.failing = ("dpsgd",)
    assert run("tiny.toml", "next.toml").exit_code == 1
    assert "nonprivate" in trainer.trained
    assert "| DP-SGD | Model1 | 75.00 |" in report(directory, "next-smoke")


def test_stopped(trainer, directory):
    trainer.interrupted_after = 1
    result = run("tiny.toml")
    assert result.exit_code == 130
    assert "the same command goes on" in result.stderr
    assert report(directory).count("not run") == 1


def test_report_only(trainer, directory):
    assert run("tiny.toml", "--report-only").exit_code == 0
    assert trainer.trained == []
    assert report(directory).count("not run") == 2


def test_elsewhere(trainer, directory):
    run("tiny.toml", "--out", "there", "--runs", "here")
    assert (directory / "there" / "tiny-smoke" / "results.json").exists()
    assert (directory / "here").exists()
    assert not (directory / "results").exists()


def test_all(trainer, directory):
    assert run("all", "--report-only").exit_code == 0
    assert {path.name for path in (directory / "results").iterdir()} == {f"{name}-smoke" for name in names()}


def test_files_of_the_user(trainer, directory):
    result = run("transfer", "--scale", "cpu", "--report-only", "--image-folder", "cifar100=images")
    assert result.exit_code == 0, result.output
    written = report(directory, "transfer-cpu")
    assert "    spectral-dp reproduce transfer --scale cpu --image-folder cifar100=images\n" in written
    assert "image_folder" in written
    refused = run("transfer", "--scale", "cpu", "--weights", "vgg=file")
    assert refused.exit_code == 2
    assert "--weights vgg" in refused.stderr


def test_list():
    result = run("--list", "--scale", "full")
    assert result.exit_code == 0
    assert all(name in result.output for name in names())
    assert "240" in result.output  # 2 panels of 40 cells, 3 seeds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which recipe? Choose from accuracy-epsilon"),
        (("best",), "unknown recipe 'best': choose from accuracy-epsilon"),
        (("best-results", "--scale", "large"), "no scale 'large': it has smoke, cpu, full"),
        (("none.toml",), "cannot read"),
        (("tiny.toml", "./tiny.toml"), "the same report"),
    ],
)
def test_refusals(trainer, directory, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert trainer.trained == []
    assert not (directory / "results").exists()


def test_missing_data_stop_everything_before_it_begins(trainer, directory):
    """Catches hours of one recipe before the next one finds its data missing."""
    (directory / "far.toml").write_text(RECIPE.replace("epochs = 1", 'dataset = "cifar10"'))
    result = run("tiny.toml", "far.toml")
    assert result.exit_code == 2
    assert "spectral-dp data get cifar10" in result.stderr
    assert trainer.trained == []


@pytest.mark.slow
def test_with_real_training(directory):
    result = run("tiny.toml", "--jobs", 2)
    assert result.exit_code == 0, result.output
    found = json.loads((directory / "results" / "tiny-smoke" / "results.json").read_text())
    for cell in found["panels"][0]["cells"]:
        assert 0 < cell["mean_percent"] < 100
        assert 0 < cell["epsilon"] <= 2
