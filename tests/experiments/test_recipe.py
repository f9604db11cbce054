"""Recipes: those that come with the package are valid and the paper's; a wrong one is refused, with file and place."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.support.pretrained import small_files, weights_content

from spectral_dp import data
from spectral_dp.experiments import recipe as recipes
from spectral_dp.experiments.grid import run_name
from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.recipe import RecipeError, read_recipe
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import SettingsError
from spectral_dp.experiments.spectral import spectral_config
from spectral_dp.experiments.trainer import load_data, run

SCALES = ("smoke", "cpu", "full")

TINY = """
title = "Tiny"
source = "Table 0"
set = { epochs = 7, batch_size = 70 }
rows = [
    { label = "a", set = { method = "dpsgd" } },
    { label = "b", set = { method = "spectral" }, scales.smoke.set = { batch_size = 5 } },
]
columns = [{ label = "x" }, { label = "y", set = { learning_rate = 3 } }]
paper = [[90.5, nan], ["n/a", 80]]

[scales.smoke]
seeds = 1
set = { epochs = 1 }
[scales.full]
seeds = 2

[[panels]]
title = "First"
origin = "paper"
set = { epochs = 8 }
"""


@pytest.fixture
def tiny(tmp_path):
    """Reads the recipe above with some of its text replaced."""

    def read(old="", new="", *, scale="full", text=TINY):
        assert old in text
        path = tmp_path / "tiny.toml"
        path.write_text(text.replace(old, new, 1) if old else text)
        return read_recipe(str(path), scale)

    return read


def paper_panel(name):
    """The panel with the paper's own settings, as it would be run in full."""
    (panel,) = (panel for panel in read_recipe(name, "full").panels if panel.origin == "paper")
    return panel


def cells(recipe):
    return [cell for panel in recipe.panels for cell in panel.cells.values()]


def filters(settings):
    """Whether anything is dropped."""
    return any([settings.conv_ratio, settings.linear_ratio, *settings.layer_ratios.values()])


class TestShipped:
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("name", recipes.names())
    def test_every_cell_is_valid(self, name, scale):
        recipe = read_recipe(name, scale)
        assert (recipe.name, recipe.scale) == (name, scale)
        assert recipe.notes
        assert all(cell.settings.reproducible and cell.settings.dataset in data.NAMES for cell in cells(recipe))
        # Some are of networks and records that the paper does not have.
        without = ("priors", "priors-ablation", "text", "transfer")
        assert name in without or "paper" in {panel.origin for panel in recipe.panels}

    def test_the_tables_and_figures_of_the_paper(self):
        assert recipes.names() == [
            "accuracy-epsilon",
            "best-results",
            "clip-batch",
            "learning-rate",
            "model1-block-ratio",
            "model1-circulant-dpsgd",
            "model2-ratio",
            "priors",
            "priors-ablation",
            "scattering",
            "text",
            "transfer",
            "transfer-paper",
        ]

    @pytest.mark.parametrize("name", recipes.names())
    def test_the_full_scale_changes_nothing(self, name):
        assert not any(cell.reductions for cell in cells(read_recipe(name, "full")))

    @pytest.mark.parametrize("name", recipes.names())
    def test_smoke_is_small_and_needs_no_download(self, name):
        recipe = read_recipe(name, "smoke")
        assert len(recipe.grid().runs()) <= 10
        for cell in cells(recipe):
            assert cell.settings.dataset == "digits"
            assert cell.settings.train_size == 256
            assert cell.settings.epochs <= 3

    @pytest.mark.parametrize("name", recipes.names())
    def test_smoke_networks_fit_their_images_and_filters(self, name, monkeypatch, tmp_path):
        """Catches an image too small for a network, or a block size or band that a layer does not take."""
        if name == "scattering":
            pytest.importorskip("kymatio")
            monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path))
        for settings in {run_name(s): s for s in read_recipe(name, "smoke").grid().runs().values()}.values():
            data = load_data(settings)
            model = build_network(settings, data.input_shape, data.classes)
            config = spectral_config(settings, model, steps=1)
            is_spectral = settings.method == "spectral" and (settings.support == "signal" or filters(settings))
            assert bool(config.layer_configs(model)) == is_spectral

    def test_settings_of_the_paper(self):
        """Section "Parameters setting": batch 500, 30 epochs, C 0.5 and rate 0.01 for Model1, else 0.1 and 0.001."""
        panel = paper_panel("best-results")
        model1 = panel.cells["Spectral-DP", "MNIST, Model1, ε = 2"].settings
        lenet5 = panel.cells["Spectral-DP", "MNIST, LeNet-5, ε = 2"].settings
        for settings in (model1, lenet5):
            assert (settings.batch_size, settings.epochs, settings.delta) == (500, 30, 1e-5)
            assert (settings.block_size, settings.last_block_size) == (8, 10)
            assert (settings.support, settings.order, settings.band) == ("signal", "clip_then_filter", "paper")
        assert (model1.epsilon, model1.max_grad_norm, model1.learning_rate) == (2, 0.5, 0.01)
        assert (lenet5.epsilon, lenet5.max_grad_norm, lenet5.learning_rate) == (2, 0.1, 0.001)

    @pytest.mark.parametrize(
        ("name", "row", "column", "printed"),
        [
            ("best-results", "Spectral-DP", "MNIST, Model1, ε = 2", 97.1),
            ("best-results", "DP-SGD", "CIFAR-10, Model3, ε = 3", 57.58),
            ("accuracy-epsilon", "DP-SGD", "MNIST, LeNet-5, ε = 2", 95.95),
            ("model2-ratio", "ε = 3", "ρ = 0.75", 60.63),
            ("model2-ratio", "ε = 7", "ρ = 0", 65.65),
            ("model1-block-ratio", "block 8, ε = 0.5", "ρ = 0.75", 94.98),
            ("model1-block-ratio", "block 16, ε = 2", "ρ = 0.875", 95.74),
            ("model1-circulant-dpsgd", "DP-SGD", "blocks of 16", 95.54),
            ("clip-batch", "C = 0.1", "B = 2048", None),
            ("learning-rate", "learning rate 0.01", "Model3, ε = 3", None),
        ],
    )
    def test_printed_figures(self, name, row, column, printed):
        assert paper_panel(name).cells[row, column].paper == printed

    def test_average_printed_in_the_text(self):
        """The paper prints the means over its five ratios: a wrongly copied row would show."""
        found = paper_panel("model1-block-ratio").cells
        means = {"block 8, ε = 0.5": 94.02, "block 8, ε = 1": 95.78, "block 8, ε = 1.5": 96.33, "block 8, ε = 2": 96.57}
        means |= {
            "block 16, ε = 0.5": 92.90,
            "block 16, ε = 1": 95.29,
            "block 16, ε = 1.5": 96.03,
            "block 16, ε = 2": 96.17,
        }
        for row, mean in means.items():
            values = [cell.paper for (at, _), cell in found.items() if at == row]
            assert sum(values) / len(values) == pytest.approx(mean, abs=0.011)

    @pytest.mark.parametrize("name", ["best-results", "accuracy-epsilon", "model1-circulant-dpsgd"])
    def test_spectral_dp_filters(self, name):
        """Without a filter it is DP-SGD, and the row compares nothing."""
        for cell in cells(read_recipe(name, "full")):
            assert cell.settings.method != "spectral" or filters(cell.settings)

    def test_the_paper_has_no_dense_spectral_dp(self):
        assert ("Spectral-DP", "Model1") not in paper_panel("model1-circulant-dpsgd").cells

    @pytest.mark.parametrize("scale", ["cpu", "full"])
    def test_curves_are_drawn_from_the_runs_of_the_best_results(self, scale):
        curves, best = (read_recipe(n, scale) for n in ("accuracy-epsilon", "best-results"))
        drawn = replace(curves, panels=tuple(panel for panel in curves.panels if panel.figure == "epsilon"))
        assert set(drawn.grid().runs()) < set(best.grid().runs())

    @pytest.mark.parametrize("scale", ["cpu", "full"])
    def test_every_network_from_scratch_is_in_both(self, scale):
        """CIFAR-10 has not to be left out where there are only processor cores; a run of its own for every epsilon."""
        settings = [cell.settings for cell in cells(read_recipe("best-results", scale))]
        assert {each.model for each in settings} == {"model1", "lenet5", "model2", "model3"}
        (panel,) = (panel for panel in read_recipe("accuracy-epsilon", scale).panels if panel.figure == "table")
        found = {(cell.settings.model, cell.settings.epsilon) for cell in panel.cells.values()}
        assert found == {(m, e) for m in ("model1", "lenet5", "model2") for e in (0.5, 1, 2, 3, 8)}

    def test_the_tables_of_ratios_are_whole_at_the_scale_of_a_cpu(self):
        for name in ("model2-ratio", "model1-block-ratio"):
            cpu, full = (
                {panel.title: set(panel.cells) for panel in read_recipe(name, s).panels} for s in ("cpu", "full")
            )
            assert cpu == full

    def test_recipes_share_what_is_the_same(self):
        best = set(read_recipe("best-results", "full").grid().runs())
        assert best & set(read_recipe("model1-block-ratio", "full").grid().runs())
        assert best & set(read_recipe("model2-ratio", "full").grid().runs())


class TestReading:
    def test_a_panel(self, tiny):
        recipe = tiny()
        assert (recipe.name, recipe.title, recipe.source, recipe.seeds) == ("tiny", "Tiny", "Table 0", 2)
        (panel,) = recipe.panels
        assert (panel.title, panel.origin, panel.figure) == ("First", "paper", "table")
        assert (panel.rows, panel.columns) == (("a", "b"), ("x", "y"))

    def test_paper(self, tiny):
        found = {place: cell.paper for place, cell in tiny().panels[0].cells.items()}
        assert found == {("a", "x"): 90.5, ("a", "y"): None, ("b", "y"): 80}  # nothing to run at (b, x)

    def test_the_most_particular_setting_counts(self, tiny):
        particular = 'set = { epochs = 8 }\ncells = [{ row = "a", column = "y", set = { learning_rate = 5 } }]'
        found = tiny("set = { epochs = 8 }", particular).panels[0].cells
        assert found["a", "x"].settings.epochs == 8  # panel over recipe
        assert found["b", "y"].settings.learning_rate == 3  # column
        assert found["a", "y"].settings.learning_rate == 5  # cell over column

    def test_rows_win_over_columns(self, tiny):
        found = tiny('{ method = "dpsgd" }', '{ method = "dpsgd", learning_rate = 4 }').panels[0].cells
        assert found["a", "y"].settings.learning_rate == 4

    def test_the_scale_has_the_last_word(self, tiny):
        found = tiny(scale="smoke").panels[0].cells
        assert {cell.settings.epochs for cell in found.values()} == {1}  # over the panel's 8
        assert found["a", "y"].settings.batch_size == 70
        assert found["b", "y"].settings.batch_size == 5
        assert found["b", "y"].reductions == {"epochs": (8, 1), "batch_size": (70, 5)}

    def test_part_of_the_grid(self, tiny):
        (panel,) = tiny(text=TINY + '[panels.scales.full]\ncolumns = ["y"]\n').panels
        assert panel.columns == ("y",)
        assert set(panel.cells) == {("a", "y"), ("b", "y")}

    def test_no_rows_leave_out_the_panel(self, tiny):
        second = TINY[TINY.index("[[panels]]") :] + "[panels.scales.full]\nrows = []\n"
        assert len(tiny(text=TINY + second).panels) == 1
        assert len(tiny(text=TINY + second, scale="smoke").panels) == 2

    def test_settings_without_effect_are_dropped(self, tiny):
        """DP-SGD has no band: two cells that differ in it are the same run."""
        banded = tiny('{ label = "x" }', '{ label = "x", set = { band = "box", learning_rate = 3 } }').panels[0].cells
        assert banded["a", "x"].settings == banded["a", "y"].settings


class TestRefusal:
    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("epochs = 7", "epoch = 7", r"panel 1, row 'a', column 'x' has unknown settings epoch"),
            ("batch_size = 70", "batch_size = 0", r"row 'a', column 'x': batch_size must be positive"),
            ("epochs = 7", 'model = "model9"', r"row 'a', column 'x': unknown model 'model9'"),
            ("epochs = 7", 'dataset = "imagenet"', r"row 'a', column 'x': .*imagenet"),
            ("epochs = 7", "seed = 7", r"sets seed: leave out"),
            ("[[90.5, nan]", "[[90.5]", r"panel 1: paper must have 2 rows of 2 values, got \[\[90.5\]"),
            ("[[90.5, nan], ", "[", r"paper must have 2 rows of 2 values"),
            ("90.5", "905", r"paper has 905: give a percentage"),
            ("90.5", '"?"', r"paper has '\?': give a percentage"),
            ('"b"', '"a"', r"rows\[1\]: the label 'a' is there twice"),
            ('label = "x"', 'title = "x"', r"columns\[0\] has no 'label'"),
            ("scales.smoke.set", "scales.smok.set", r"rows\[1\] has unknown scales smok: the recipe has smoke, full"),
            ("scales.smoke.set", "scales.smoke", r"rows\[1\], scales.smoke has unknown entries batch_size"),
            ('origin = "paper"', 'origin = "mine"', r"origin must be one of paper, tuned, ours, got 'mine'"),
            ('origin = "paper"', "", r"panel 1 has no 'origin': add it"),
            ("seeds = 1", "seeds = 0", r"seeds must be at least 1, got 0"),
            ("seeds = 1", "", r"scales.smoke has no 'seeds'"),
            ('title = "Tiny"', 'title = "Tiny"\ncolour = 1', r"unknown entries colour: there are .*title"),
            ('title = "Tiny"', "title = 1", r"title must be of type str, got 1"),
            ("set = { epochs = 8 }", "scales.smoke.rows = ['c']", r"no such rows as \['c'\]: there are \['a', 'b'\]"),
            ("set = { epochs = 8 }", "scales.smoke.rows = []", r"leaves nothing to run"),
            ("set = { epochs = 8 }", 'cells = [{ row = "c", column = "x" }]', r"row must be one of a, b, got 'c'"),
            ('title = "Tiny"', "title =", r"is not valid TOML"),
        ],
    )
    def test_names_file_and_place(self, tiny, old, new, message):
        with pytest.raises((RecipeError, SettingsError), match=message) as caught:
            tiny(old, new, scale="smoke")
        assert "tiny.toml" in str(caught.value)

    def test_no_grid(self, tiny):
        with pytest.raises(RecipeError, match="panel 1 has no columns: give them there, or once for all panels"):
            tiny(TINY[TINY.index("columns") : TINY.index("paper = [[")])

    def test_scale(self, tiny):
        with pytest.raises(RecipeError, match=r"tiny.toml has no scale 'huge': it has smoke, full"):
            tiny(scale="huge")

    def test_name(self):
        with pytest.raises(RecipeError, match=r"unknown recipe 'best': choose from accuracy-epsilon, best-results"):
            read_recipe("best", "smoke")

    def test_file(self, tmp_path):
        with pytest.raises(SettingsError, match=r"cannot read .*none.toml: No such file"):
            read_recipe(str(tmp_path / "none.toml"), "smoke")


def test_cells_of_all_panels_come_before_those_of_one(tiny):
    text = TINY.replace(
        "columns = [", 'cells = [{ row = "a", column = "x", set = { epochs = 3, shift = 1 } }]\ncolumns = [', 1
    )
    text += 'cells = [{ row = "a", column = "x", set = { epochs = 2 } }]\n'
    settings = tiny(text=text).panels[0].cells["a", "x"].settings
    assert (settings.epochs, settings.shift) == (2, 1)


class TestFiles:
    """Data sets and weights that cannot be fetched are read from where the user has them."""

    def test_in_the_place_of_what_would_be_fetched(self):
        recipe = read_recipe("transfer-paper", "full")
        moved = recipe.with_files({"cifar100": "images"}, {"wrn-28-10": "wide.pth", "resnet18": "resnet.pth"})
        for before, after in zip(cells(recipe), cells(moved), strict=True):
            of_cifar100 = before.settings.dataset == "cifar100"
            assert after.settings.image_folder == ("images" if of_cifar100 else None)
            assert after.settings.dataset == ("image-folder" if of_cifar100 else "cifar10")
            of_wrn = before.settings.features == "wrn-28-10"
            assert after.settings.feature_options == ({"weights": "wide.pth"} if of_wrn else {})
            assert after.settings.weights == ("resnet.pth" if before.settings.model == "resnet18" else None)
            assert after.is_comparable

    def test_what_no_cell_reads_is_refused(self):
        recipe = read_recipe("transfer", "cpu")
        with pytest.raises(RecipeError, match=r"--image-folder mnist: transfer at scale cpu reads cifar10, cifar100"):
            recipe.with_files({"mnist": "images"}, {})
        with pytest.raises(RecipeError, match=r"--weights vgg: transfer at scale cpu reads efficientnet-lite0"):
            recipe.with_files({}, {"vgg": "file"})

    @pytest.mark.parametrize(
        ("panel", "row", "column"),
        [
            (0, "Spectral-DP", "Transfer2"),
            (1, "DP-SGD", "ε = 2"),
            (2, "Spectral-DP", "ε = 1"),
            (3, "Spectral-DP, 2 FC layers", "ε = 4"),
            (4, "Spectral-DP, 1 FC layer", "ε = 1"),
        ],
    )
    def test_networks_of_the_paper_run_on_weights_of_a_file(self, panel, row, column, tmp_path, monkeypatch):
        monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))
        files = {name: str(path) for name, path in small_files(tmp_path, monkeypatch).items() if name != "minilm-l6"}
        if panel < 2:
            files["resnet18"] = str(tmp_path / "resnet18.safetensors")
            (tmp_path / "resnet18.safetensors").write_bytes(weights_content("resnet18"))
        recipe = read_recipe("transfer-paper", "full")
        known = {name for cell in cells(recipe) for name in (cell.settings.features, cell.settings.model)}
        recipe = recipe.with_files({}, {name: path for name, path in files.items() if name in known})
        settings = recipe.panels[panel].cells[row, column].settings
        small = {"dataset": "digits", "train_size": 32, "test_size": 10, "batch_size": 8, "epochs": 1, "delta": 1e-3}
        size = {"image_size": 32} if settings.tune else {}
        summary = run(replace(settings, **small, **size, accountant="rdp"), RunDirectory(tmp_path / "run"))
        assert summary["epsilon"] > 0
        assert all(
            torch.isfinite(value).all() for value in load_file(tmp_path / "run" / "weights.safetensors").values()
        )
