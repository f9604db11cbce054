"""Reports of recipes: ours beside the paper's, from whatever is finished, and no run counted that is not the cell's."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from tests.support.fabricated_runs import fabricate

from spectral_dp.experiments import reproduction
from spectral_dp.experiments.grid import run_name
from spectral_dp.experiments.recipe import read_recipe
from spectral_dp.experiments.settings import ResolvedSettings
from spectral_dp.experiments.statement import HELD_OUT, SEEDED

RECIPE = """
title = "Tiny"
source = "Table 0"
notes = "What differs."
rows = [{ label = "DP-SGD", set = { method = "dpsgd" } }, { label = "Spectral-DP", set = { linear_ratio = 0.5 } }]
columns = [{ label = "ε | 1", set = { epsilon = 1 } }, { label = "ε | 2", set = { epsilon = 2 } }]
paper = [[90.5, nan], ["n/a", 80]]

[scales.smoke]
seeds = 2
set = { epochs = 3 }
[scales.other]
seeds = 1
set = { dataset = "mnist" }
[scales.full]
seeds = 1

[[panels]]
title = "First"
origin = "paper"
[[panels]]
title = "Second"
origin = "tuned"
scales.smoke.rows = ["DP-SGD"]
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def recipe(path):
    return read_recipe(str(path), "smoke")


@pytest.fixture
def finish(tmp_path):
    """Puts a finished run where reproduction looks for it."""

    def finish(settings, accuracy):
        return fabricate(tmp_path / "runs" / run_name(settings), accuracy=accuracy, **settings.to_dict())

    return finish


@pytest.fixture
def report(recipe, tmp_path):
    def report(recipe=recipe, links=False):
        reproduction.write_report(recipe, tmp_path / "runs", tmp_path / "results" / "out", "the command")
        text = (tmp_path / "results" / "out" / "README.md").read_text()
        return text if links else re.sub(r": \[\d\]\([^|]*\)", "", text)

    return report


def cell(recipe, row, column, panel=0):
    return recipe.panels[panel].cells[row, column].settings


def test_the_grid_has_every_distinct_cell_with_every_seed(recipe):
    """The panels have the DP-SGD cells in common."""
    assert len(recipe.grid().settings) == 5
    runs = recipe.grid().runs()
    assert len(runs) == 3 * 2
    assert {run.seed for run in runs.values()} == {0, 1}


class TestReport:
    def test_ours_beside_the_papers(self, recipe, finish, report):
        finish(replace(cell(recipe, "DP-SGD", "ε | 1"), seed=0), 0.90)
        finish(replace(cell(recipe, "DP-SGD", "ε | 1"), seed=1), 0.92)
        text = report()
        assert r"| DP-SGD | ε \| 1 | 91.00 ± 1.41 | 90.50 | +0.50 | 1.5 | 2 | the paper's, reduced |" in text
        assert r"| DP-SGD | ε \| 1 | 91.00 ± 1.41 | 90.50 | +0.50 | 1.5 | 2 | tuned, reduced |" in text
        assert "- 2 of 6 runs finished; they took 2 min 30 s" in text  # 75 s each; each stands in two cells

    def test_one_seed_of_two(self, recipe, finish, report):
        finish(replace(cell(recipe, "Spectral-DP", "ε | 2"), seed=1), 0.8)
        assert r"| Spectral-DP | ε \| 2 | 80.00 | 80.00 | +0.00 | 1.5 | 1 of 2 | the paper's, reduced |" in report()

    def test_every_run_has_a_link_to_what_is_kept_of_it(self, recipe, finish, report, tmp_path):
        settings = cell(recipe, "DP-SGD", "ε | 1")
        finish(settings, 0.9)
        link = f"../runs/{run_name(settings)}/summary.json"
        assert f"| 1 of 2: [0]({link}) |" in report(links=True)
        assert json.loads((tmp_path / "results" / "out" / link).read_text())["heldout_accuracy"] == 0.9
        kept = {file.name for file in (tmp_path / "results" / "out" / link).parent.iterdir()}
        assert kept <= {"config.json", "metrics.jsonl", "layers.json", "privacy.json", "summary.json"}  # no weights

    def test_what_was_kept_counts_when_the_run_is_gone(self, recipe, finish, report, tmp_path):
        finish(cell(recipe, "DP-SGD", "ε | 1"), 0.9)
        before = report()
        shutil.rmtree(tmp_path / "runs")
        finish(replace(cell(recipe, "DP-SGD", "ε | 1"), seed=1), 0.8)
        assert "| 90.00 | 90.50 |" in before
        assert "| 85.00 ± 7.07 | 90.50 |" in report()

    def test_a_run_that_is_there_counts_before_what_was_kept(self, recipe, finish, report, tmp_path):
        finish(cell(recipe, "DP-SGD", "ε | 1"), 0.9)
        report()
        shutil.rmtree(tmp_path / "runs")
        finish(cell(recipe, "DP-SGD", "ε | 1"), 0.8)
        assert "| 80.00 | 90.50 |" in report()
        shutil.rmtree(tmp_path / "runs")
        assert "| 80.00 | 90.50 |" in report()

    def test_what_was_kept_of_other_settings_does_not_count(self, recipe, finish, report, tmp_path):
        settings = cell(recipe, "DP-SGD", "ε | 1")
        finish(settings, 0.9)
        report()
        shutil.rmtree(tmp_path / "runs")
        config = tmp_path / "results" / "runs" / run_name(settings) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"learning_rate": 123.0}))
        assert "| 90.00 |" not in report()

    def test_a_run_of_other_settings_does_not_replace_what_was_kept(self, recipe, finish, report, tmp_path):
        settings = cell(recipe, "DP-SGD", "ε | 1")
        finish(settings, 0.9)
        report()
        config = tmp_path / "runs" / run_name(settings) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"learning_rate": 123.0}))
        assert "| 90.00 | 90.50 |" in report()
        assert "| 90.00 | 90.50 |" in report()  # it is still there

    def test_nothing_finished(self, report, tmp_path):
        text = report()
        assert r"| DP-SGD | ε \| 2 | not run | not printed |  |  | 0 of 2 | the paper's, reduced |" in text
        assert not list((tmp_path / "results" / "out").glob("*.png"))

    def test_what_is_not_in_the_paper_is_not_said_to_be(self, recipe, report):
        assert report(replace(recipe, source="")).startswith("# Tiny, smoke scale\n\n    the command\n")

    def test_what_does_not_apply_is_left_out(self, report):
        assert r"| Spectral-DP | ε \| 1 |" not in report()

    def test_what_a_reader_must_know(self, recipe, finish, report):
        finish(cell(recipe, "DP-SGD", "ε | 1"), 0.9)
        text = report()
        assert text.startswith("# Tiny: Table 0 of the paper, smoke scale\n\n    the command\n")
        for part in (
            SEEDED,
            HELD_OUT,
            "What differs.",
            "the best of its runs",
            "after the last epoch",
            "- made by spectral_dp 0",
        ):
            assert part in text
        assert "Changed from the paper's at this scale: `epochs` 20 → 3." in text
        assert "Settings of all cells: `block_size` 0" in text

    def test_full_scale_is_not_called_reduced(self, path, report):
        assert "reduced" not in report(read_recipe(str(path), "full"))

    def test_another_data_set_is_no_comparison(self, path, finish, report, monkeypatch):
        saved = []
        monkeypatch.setattr(reproduction, "save_figure", lambda figure, path: saved.append(figure))
        other = read_recipe(str(path), "other")
        finish(cell(other, "DP-SGD", "ε | 1"), 0.9)
        text = report(other)
        assert r"| 90.00 | 90.50 |  | 1.5 | 1 |" in text
        assert (
            "**On another data set than the paper's: this shows that everything runs, and is no comparison.**" in text
        )
        assert "another data set" in saved[0].get_suptitle()  # a picture may be copied from where it stands

    def test_for_machines(self, recipe, finish, report, tmp_path):
        finish(cell(recipe, "DP-SGD", "ε | 1"), 0.9)
        report()
        found = json.loads((tmp_path / "results" / "out" / "results.json").read_text())
        assert (found["recipe"], found["scale"], found["command"]) == ("tiny", "smoke", "the command")
        first, second, *_ = found["panels"][0]["cells"]
        assert (first["row"], first["column"], first["paper_percent"]) == ("DP-SGD", "ε | 1", 90.5)
        assert first["mean_percent"] == pytest.approx(90)
        ((name, run),) = first["runs"].items()
        assert name == run_name(cell(recipe, "DP-SGD", "ε | 1"))
        assert run["heldout_accuracy"] == pytest.approx(0.9)
        assert second["mean_percent"] is None
        assert second["paper_percent"] is None
        settings = found["panels"][0]["settings"] | first["settings"]
        assert ResolvedSettings.from_dict(settings) == cell(recipe, "DP-SGD", "ε | 1")


class TestPictures:
    def pngs(self, tmp_path):
        found = sorted((tmp_path / "results" / "out").glob("*.png"))
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)
        return [path.name for path in found]

    def test_a_table(self, recipe, finish, report, tmp_path):
        finish(cell(recipe, "Spectral-DP", "ε | 2"), 0.9)
        assert "![First](panel1.png)" in report()
        assert self.pngs(tmp_path) == ["panel1.png"]  # nothing of the second panel is finished

    def test_values_of_a_table(self, recipe, finish, tmp_path):
        finish(cell(recipe, "Spectral-DP", "ε | 2"), 0.9)
        panel = recipe.panels[0]
        results = reproduction.write_report(recipe, tmp_path / "runs", tmp_path / "out", "")[0]
        ours, paper = reproduction._heat_map(panel, results).axes
        assert [text.get_text() for text in ours.texts] == ["–", "–", "–", "90.00"]
        assert [text.get_text() for text in paper.texts] == ["90.50", "–", "–", "80.00"]
        assert ours.images[0].get_clim() == paper.images[0].get_clim() == (80, 90.5)

    @pytest.mark.parametrize("kind", ["epochs", "epsilon"])
    def test_curves(self, path, finish, report, tmp_path, kind):
        path.write_text(RECIPE.replace('title = "Tiny"', f'title = "Tiny"\nfigure = "{kind}"'))
        recipe = read_recipe(str(path), "smoke")
        for row in ("DP-SGD", "Spectral-DP"):
            finish(cell(recipe, row, "ε | 2"), 0.9)
        assert "![First, ε | 2](panel1-2.png)" in report(recipe)
        assert self.pngs(tmp_path) == ["panel1-2.png", "panel2-2.png"]  # one for each column that has runs

    def test_no_curve_of_epsilon_without_privacy(self, path, finish, report, tmp_path):
        text = RECIPE.replace('method = "dpsgd"', 'method = "nonprivate"')
        path.write_text(text.replace('title = "Tiny"', 'title = "Tiny"\nfigure = "epsilon"'))
        recipe = read_recipe(str(path), "smoke")
        finish(cell(recipe, "DP-SGD", "ε | 2"), 0.9)
        report(recipe)
        assert self.pngs(tmp_path) == []
