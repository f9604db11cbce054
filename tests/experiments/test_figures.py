"""Pictures of runs: the right numbers, readable with two layers or thirty, and several on one page."""

import re
import statistics
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.support.fabricated_runs import LAYERS, SQUARE, evaluation, fabricate, layer

from spectral_dp.experiments import figures
from spectral_dp.experiments.statement import HELD_OUT


def pngs(run):
    found = sorted(run.path.glob("*.png"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in found)
    return [path.name for path in found]


def rows(*accuracies, epsilon=0.5):
    return [
        evaluation(epoch, accuracy=accuracy, epsilon=None if epsilon is None else epsilon * epoch)
        for epoch, accuracy in enumerate(accuracies, 1)
    ]


def drawn(figure):
    figure.draw_without_rendering()
    return figure


def texts(figure):
    return " ".join(text.get_text() for text in drawn(figure).findobj(lambda artist: hasattr(artist, "get_text")))


class TestPicturesOfARun:
    def test_a_private_run_has_all_four(self, tmp_path):
        run = fabricate(tmp_path / "run")
        figures.draw_run(run)
        assert pngs(run) == ["accuracy.png", "epsilon.png", "noise.png", "spectrum.png"]

    def test_a_non_private_run_has_no_epsilon_and_no_layers(self, tmp_path):
        run = fabricate(tmp_path / "run", method="nonprivate", layers=[])
        figures.draw_run(run)
        assert pngs(run) == ["accuracy.png"]

    def test_layers_without_a_filter(self, tmp_path):
        run = fabricate(tmp_path / "run", method="dpsgd", layers=[layer("fc.weight")])
        figures.draw_run(run)
        assert pngs(run) == ["accuracy.png", "epsilon.png", "noise.png"]

    @pytest.mark.parametrize(("method", "is_marked"), [("spectral", True), ("nonprivate", False)])
    def test_accuracy_says_what_it_assumes(self, tmp_path, monkeypatch, method, is_marked):
        saved = {}
        monkeypatch.setattr(figures, "save_figure", lambda figure, path: saved.update({path.name: figure}))
        figures.draw_run(fabricate(tmp_path / "run", method=method))
        for name in ("accuracy.png", "epsilon.png") if method == "spectral" else ("accuracy.png",):
            assert (HELD_OUT in texts(saved[name]).replace("\n", " ")) == is_marked


class TestCurves:
    def test_mean_and_band_over_seeds(self):
        figure = figures.accuracy_against_epochs({"a": [rows(0.2, 0.5), rows(0.4, 0.9)]})
        (axes,) = figure.axes
        (line,) = axes.lines
        assert line.get_xydata().tolist() == [pytest.approx((1, 0.3)), pytest.approx((2, 0.7))]
        band = axes.collections[0].get_paths()[0].vertices
        spread = statistics.stdev([0.5, 0.9])
        assert band[:, 1].max() == pytest.approx(0.7 + spread)
        assert 0.7 - spread == pytest.approx(min(y for x, y in band if x == 2))

    def test_one_seed_has_no_band(self):
        (axes,) = figures.accuracy_against_epochs({"a": [rows(0.2, 0.5)]}).axes
        assert not axes.collections

    def test_seeds_are_averaged_only_where_all_have_come(self):
        """Catches a curve that jumps where the slowest run stops."""
        (axes,) = figures.accuracy_against_epochs({"a": [rows(0.2, 0.5, 0.6), rows(0.4, 0.9)]}).axes
        assert axes.lines[0].get_xdata().tolist() == [1, 2]

    def test_accuracy_against_epsilon(self):
        (axes,) = figures.accuracy_against_epsilon({"a": [rows(0.2, 0.5)], "b": [rows(0.9, epsilon=None)]}).axes
        (line,) = axes.lines  # what guarantees nothing has no place on this axis
        assert line.get_xydata().tolist() == [[0.5, 0.2], [1.0, 0.5]]

    def test_epsilon_over_the_epochs(self):
        (axes,) = figures.epsilon_against_epochs({"a": [rows(0.2, 0.5)]}).axes
        assert axes.lines[0].get_xydata().tolist() == [[1, 0.5], [2, 1.0]]

    def test_labels_are_taken_as_they_are(self):
        """Catches mathematics between dollars, and matplotlib's hiding of labels with an underscore."""
        shown = texts(figures.accuracy_against_epochs({"_a": [rows(0.2)], "costs $5, or $6": [rows(0.3)]}))
        assert "_a" in shown
        assert r"costs \$5, or \$6" in shown  # as matplotlib writes a dollar that is one

    @pytest.mark.parametrize("curves", [2, 20])
    def test_long_labels_stay_inside_the_picture(self, curves):
        label = "a_package_with_a_long_name.and_a_module:and_a_factory_in_it, learning rate 0.25, number "
        figure = drawn(figures.accuracy_against_epochs({f"{label}{i}": [rows(0.2, 0.5)] for i in range(curves)}))
        legend, outer = figure.legends[0].get_window_extent(), figure.bbox
        assert 0 <= legend.x0 < legend.x1 <= outer.x1
        assert 0 <= legend.y0 < legend.y1 < figure.axes[0].get_window_extent().y0
        assert figure.axes[0].get_window_extent().height > 0.4 * 3 * figure.dpi

    def test_thirty_curves_can_be_told_apart(self):
        (axes,) = figures.accuracy_against_epochs({str(i): [rows(0.2, 0.5)] for i in range(30)}).axes
        assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 30


class TestSpectrum:
    def test_kept_and_dropped_with_frequency_zero_first(self):
        figure = figures.spectrum_figure(LAYERS)
        conv, fc, _ = figure.axes
        shown = conv.images[0].get_array()
        assert shown.mask.tolist() == (np.array(SQUARE) == 0).tolist()
        assert conv.images[0].origin == "upper"
        assert conv.get_title() == "conv\n6 of 9, dct"
        assert fc.images[0].get_array().mask.tolist() == [[False] * 3 + [True] * 5]
        assert fc.get_title() == "fc\n3 of 8, fourier"

    def test_a_strip_is_flat_and_a_plane_is_square(self):
        conv, fc, _ = drawn(figures.spectrum_figure(LAYERS)).axes
        assert conv.get_window_extent().width == pytest.approx(conv.get_window_extent().height, rel=0.01)
        assert fc.get_window_extent().width > 5 * fc.get_window_extent().height

    def test_gains_other_than_one_have_a_scale(self):
        soft = figures.spectrum_figure([layer("fc.weight", gains=[2.0, 1.0, 0.5])])
        assert "gain" in texts(soft)
        assert soft.axes[0].images[0].get_clim() == (0, 2)
        assert "released" in texts(figures.spectrum_figure(LAYERS))

    def test_titles_of_thirty_layers_do_not_run_into_each_other(self):
        names = [f"a.rather.deep.network.block{i}.conv.weight" for i in range(30)]
        figure = drawn(figures.spectrum_figure([layer(name, gains=SQUARE) for name in names]))
        titles = [axes.title.get_window_extent() for axes in figure.axes]
        assert not any(a.overlaps(b) for i, a in enumerate(titles) for b in titles[:i])


class TestNoise:
    @pytest.mark.parametrize("number", [2, 30])
    def test_every_layer_has_its_line(self, number):
        layers = [layer(f"block{i}.conv.weight", gains=SQUARE, noise=10.0**-i) for i in range(number)]
        (axes,) = drawn(figures.noise_figure(layers)).axes
        assert axes.get_xscale() == "log"
        released, left = axes.lines
        assert released.get_xdata().tolist() == [10.0**-i for i in range(number)]
        assert left.get_xdata().tolist() == [10.0**-i / 2 for i in range(number)]
        labels = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert len(labels) == number
        assert all(upper.y0 >= lower.y1 for upper, lower in pairwise(labels))

    def test_equal_noise_everywhere_still_has_an_axis_with_numbers(self):
        """Catches a logarithmic axis within one decade, which has none."""
        (axes,) = drawn(figures.noise_figure([layer("a", noise=0.004), layer("b", noise=0.004)])).axes
        low, high = axes.get_xlim()
        assert sum(low <= tick <= high for tick in axes.get_xticks()) >= 2

    def test_no_noise_at_all(self):
        (axes,) = drawn(figures.noise_figure([layer("a", noise=0.0)])).axes
        assert axes.get_xscale() == "linear"


class TestSvg:
    def identifiers(self, *svgs):
        return [name for svg in svgs for name in re.findall(r'\bid="([^"]*)"', svg)]

    def test_identifiers_of_two_pictures_differ_and_references_hold(self):
        both = [figures.as_svg(figures.spectrum_figure(LAYERS), prefix=p, description="d") for p in ("f1", "f2")]
        names = self.identifiers(*both)
        assert len(names) == len(set(names))
        for svg in both:
            referenced = set(re.findall(r'(?:url\(#|href="#)([^")]*)', svg))
            assert referenced
            assert referenced <= set(self.identifiers(svg))

    def test_the_same_prefix_would_collide(self):
        """The control: identifiers of one figure drawn twice are the same, so the check above can fail."""
        both = [figures.as_svg(figures.spectrum_figure(LAYERS), prefix="f", description="d") for _ in range(2)]
        assert both[0] == both[1]

    def test_it_is_xml_with_a_description_and_takes_the_colour_of_the_page(self):
        svg = figures.as_svg(figures.noise_figure(LAYERS), prefix="f", description='noise "of" <layers>')
        assert ElementTree.fromstring(svg).get("aria-label") == 'noise "of" <layers>'
        assert "currentColor" in svg
        assert "#000000" not in svg

    def test_names_cannot_break_out(self):
        svg = figures.as_svg(figures.noise_figure([layer("<script>alert(1)</script>")]), prefix="f", description="")
        assert "<script" not in svg
        assert "&lt;script" in svg

    def test_letters_the_font_lacks_do_not_warn(self):
        assert "层" in figures.as_svg(figures.noise_figure([layer("层")]), prefix="f", description="")


def test_figures_of_raw_data_say_so_in_the_picture():
    runs = [[evaluation(1, unsafe={"training_loss": 2.0}), evaluation(2, unsafe={"training_loss": 1.0})]]
    figure = figures.unsafe_figure(runs)
    assert "not to be published" in texts(figure)
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1, 2.0], [2, 1.0]]
