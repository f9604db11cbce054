"""The report: one page that needs nothing else, says what is guaranteed, and marks what is not."""

import errno
import json
import os
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.support.fabricated_runs import SQUARE, UNSAFE, fabricate, layer

from spectral_dp.experiments import figures
from spectral_dp.experiments.report import UNSAFE_MARK, write_report
from spectral_dp.experiments.run_directory import RunDirectory, RunDirectoryError
from spectral_dp.experiments.statement import HELD_OUT, SEEDED

HOSTILE = '</style></svg><script>document.title="broken"</script><b x="'


MANY = {
    "a": {"method": "spectral", "seed": 1, "accuracy": 0.5},
    "b": {"method": "spectral", "seed": 2, "accuracy": 0.7},
    "c": {"method": "dpsgd"},
    "d": {"method": "nonprivate", "layers": []},
    "e": {"method": "dpsgd", "evaluated": 1, "is_finished": False, "epochs": 7},
    "f": {"method": "spectral", "unsafe_diagnostics": True},
}


def report_on(directory, runs, *, public=False):
    """Fabricates runs, given as settings by name, and returns the page about them."""
    fabricated = [fabricate(directory / name, **given) for name, given in runs.items()]
    write_report(fabricated, directory / "report.html", public=public)
    return (directory / "report.html").read_text()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A page with everything a page can have, drawn once."""
    return report_on(tmp_path_factory.mktemp("many"), MANY)


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Makes pages about fabricated runs; without pictures, which take time, unless asked for."""

    def make(*, public=False, has_pictures=False, **runs):
        if not has_pictures:
            monkeypatch.setattr(figures, "as_svg", lambda figure, **_: "<svg></svg>")
        return report_on(tmp_path, runs, public=public)

    return make


class Tags(HTMLParser):
    """Collects tags and attributes, and what was not closed in order."""

    VOID = ("meta", "br", "hr", "img", "input", "link")

    def __init__(self, html):
        super().__init__()
        self.found, self.attributes, self.errors, self._open = [], [], [], []
        self.feed(html)
        self.errors += [f"{tag} is not closed" for tag in self._open]

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if not self._open or self._open.pop() != tag:
            self.errors.append(f"</{tag}> closes nothing")


def words(html):
    """The text of a page, in one line."""
    html = re.sub(r"<(style|svg)\b.*?</\1>", " ", html, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def row_of(html, label):
    """The cells of the line with this label in the first table."""
    table = html[: html.index("</table>")]
    line = next(part for part in table.split("<tr>") if f">{escape(label)}</th>" in part)
    return [unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", line)]


class TestPage:
    def test_needs_nothing_else(self, many):
        tags = Tags(many)
        assert not {"script", "link", "iframe", "object", "embed"} & set(tags.found)
        for name, value in tags.attributes:
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                assert value.startswith(("#", "data:image/png;base64,"))
            assert not name.startswith("on")

    def test_nothing_else_is_named_in_styles(self, many):
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", many))
        assert "@import" not in many
        assert "default-src 'none'" in many

    def test_is_balanced_and_fit_for_a_phone(self, many):
        tags = Tags(many)
        assert tags.errors == []
        assert ("name", "viewport") in tags.attributes
        assert "prefers-color-scheme: dark" in many
        assert many.count("<table") == many.count('class="scroll"')
        assert tags.found.count("h1") == 1
        assert tags.found.count("svg") == tags.found.count("figcaption") == many.count('role="img" aria-label="')
        assert 'aria-label=""' not in many

    def test_the_balance_check_can_fail(self):
        assert Tags("<p><b>text</p></b>").errors
        assert Tags("<p>text").errors

    def test_identifiers_are_unique(self, many):
        names = re.findall(r'\sid="([^"]*)"', many)
        assert names
        assert len(names) == len(set(names))

    def test_is_small(self, page):
        """With thirty layers and a hundred evaluations; half a dozen such runs stay within two megabytes."""
        layers = [layer(f"block{i}.weight", gains=[[1.0] * 32] * 32) for i in range(30)]
        html = page(run={"layers": layers, "evaluated": 100}, has_pictures=True)
        assert len(html.encode()) < 300_000

    def test_texts_are_escaped_wherever_they_come_from(self, page):
        hostile = {"model": HOSTILE, "dataset": HOSTILE, "layers": [layer(HOSTILE, gains=SQUARE, transform=HOSTILE)]}
        runs = {"a <b> run": hostile | {"unsafe_diagnostics": True}, "other": {"method": "dpsgd"}}
        html = page(**runs, has_pictures=True)
        tags = Tags(html)
        assert "script" not in tags.found
        assert "b" not in tags.found
        assert tags.errors == []
        assert HOSTILE in words(html)
        assert "a <b> run" in words(html)

    def test_tells_no_paths_of_the_machine(self, page, tmp_path):
        html = page(run={"data_path": str(tmp_path / "secret" / "images.npz")})
        assert str(tmp_path) not in html
        assert "images.npz" in html
        assert ">run<" in html

    def test_is_the_same_each_time(self, page, tmp_path):
        first = page(run={})
        write_report([RunDirectory(tmp_path / "run")], tmp_path / "again.html")
        assert (tmp_path / "again.html").read_text() == first


class TestMarks:
    def test_the_guarantee_in_words(self, page):
        text = words(page(run={}))
        assert "(1.5, 1e-05)-differential privacy with respect to adding or removing one record." in text
        assert "at most 4.482 times as probable, plus 1e-05" in text  # exp(1.5) = 4.4816...
        assert "If both answers were equally likely beforehand, the attacker is right at most" in text
        assert "settings chosen by looking at results" in text

    def test_epsilon_is_rounded_up(self, page, tmp_path):
        """Catches rounding to nearest: 1.50001 is not within a budget of 1.5."""
        page(run={})
        run = RunDirectory(tmp_path / "run")
        for path in (run.privacy, run.summary_file):
            path.write_text(json.dumps(json.loads(path.read_text()) | {"epsilon": 1.50001}))
        write_report([run], tmp_path / "report.html")
        html = (tmp_path / "report.html").read_text()
        assert "(1.501, 1e-05)-differential" in html
        assert row_of(html, "epsilon") == ["1.501"]

    def test_held_out_accuracy_comes_with_its_assumption(self, many):
        assumption = escape(HELD_OUT[0].upper() + HELD_OUT[1:])
        places = re.findall(r"<figcaption>(Held-out accuracy[^<]*)</figcaption>", many)
        assert len(places) == 2
        assert all(assumption in place for place in places)
        for table in many.split('<div class="scroll"')[1:]:
            region, _, after = table.partition("</table></div>")
            if ">held-out accuracy<" in region and ">nonprivate<" not in region.partition("<tbody>")[2]:
                assert after.startswith(f'<p class="note">{assumption}')

    def test_figures_of_raw_data_are_marked(self, page):
        html = page(run={"unsafe_diagnostics": True})
        body = html[html.index("<body>") :]
        head, *boxes = re.split(r'<div class="box unsafe">', body)
        assert len(boxes) == 2  # a warning at the top, and the figures themselves
        for name, value in UNSAFE.items():
            assert f"{value:.6g}" in boxes[1]
            assert name.replace("_", " ") in boxes[1]
            assert name.replace("_", " ") not in head + boxes[0]
        mark = UNSAFE_MARK[1:]
        assert boxes[0].count(mark) == 1
        assert boxes[1].count(mark) >= 3  # at the box, the picture and the table

    def test_and_left_out_of_a_public_page(self, page):
        html = page(run={"unsafe_diagnostics": True}, public=True)
        body = html[html.index("<body>") :]
        assert 'class="box unsafe"' not in body
        for name, value in UNSAFE.items():
            assert f"{value:.6g}" not in body
            assert name.replace("_", " ") not in body
        assert "accuracy" in body

    def test_nothing_is_marked_where_nothing_was_recorded(self, page):
        assert UNSAFE_MARK[1:] not in page(run={})

    def test_a_seeded_run_is_not_called_private(self, page):
        html = page(run={"reproducible": True})
        assert SEEDED[1:] in words(html)
        assert 'class="box guaranteed"' not in html
        assert row_of(html, "guarantee") == ["none: noise from a seed"]

    def test_an_unfinished_seeded_run_neither(self, page):
        assert SEEDED[1:] in words(page(run={"reproducible": True, "is_finished": False}))

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"method": "nonprivate"}, "No guarantee: this is ordinary training"),
            ({"epsilon": None, "noise_multiplier": 0.0}, "No guarantee: epsilon is infinite"),
        ],
    )
    def test_no_guarantee_is_said(self, page, settings, reason):
        html = page(run=settings)
        assert reason in words(html)
        assert 'class="box guaranteed"' not in html
        assert row_of(html, "epsilon") == ["–"]

    def test_several_private_runs_add_up(self, page):
        assert "the sum of their epsilons" in page(a={}, b={"seed": 1})

    def test_one_private_run_beside_others_does_not(self, page):
        assert "the sum of their epsilons" not in page(
            a={}, b={"method": "nonprivate"}, c={"method": "dpsgd", "reproducible": True}
        )


class TestRuns:
    def test_an_unfinished_run_is_marked(self, page):
        html = page(run={"is_finished": False, "evaluated": 2, "epochs": 7, "method": "dpsgd"})
        assert "Unfinished: 2 of 7 epochs are evaluated." in words(html)
        assert row_of(html, "guarantee") == ["so far"]
        assert "had spent epsilon 1" in words(html)

    def test_a_run_that_has_only_begun(self, page, tmp_path):
        run = fabricate(tmp_path / "begun", evaluated=0, is_finished=False)
        run.layers.unlink()
        run.metrics_file.unlink()
        write_report([run], tmp_path / "report.html")
        assert "Not evaluated yet." in (tmp_path / "report.html").read_text()

    def test_the_spectrum_and_noise_of_each_layer(self, many):
        for text in ("6 of 9, dct", "3 of 8, fourier", "conv.bias"):
            assert f">{text}<" in many
        assert "The kept spectrum" in many

    def test_a_filter_that_changes_says_when_it_was_drawn(self, page):
        assert "This filter changes" in page(run={"filter": "annealed"})
        assert "This filter changes" not in page(other={})

    def test_runs_that_differ_in_their_seed_are_one_line(self, many):
        cells = row_of(many, "spectral, unsafe diagnostics False")
        assert cells[0] == "60.00 ± 14.14 % (n = 2)"
        assert "1, 2" in cells
        assert many[: many.index("</table>")].count("<tr>") == 1 + 5

    def test_seeds_alone_need_no_comparison(self, page):
        html = page(a={"accuracy": 0.5}, b={"seed": 1, "accuracy": 0.7})
        assert "Comparison" not in html
        assert row_of(html, "held-out accuracy") == ["60.00 ± 14.14 % (n = 2)"]
        assert row_of(html, "runs") == ["a, b"]

    def test_what_else_differs_is_listed(self, page):
        html = page(a={"method": "dpsgd", "learning_rate": 0.25}, b={"method": "spectral", "momentum": 0.75})
        table = html[html.index("Settings that differ") :].partition("</table>")[0]
        assert re.findall(r'<th scope="row">(.*?)</th>', table) == ["method", "learning rate", "momentum"]

    def test_nothing_is_listed_where_only_the_end_is_missing(self, page):
        html = page(a={}, b={"is_finished": False})
        assert "Comparison" in html
        assert "Settings that differ" not in html

    def test_a_run_named_twice_counts_once(self, page, tmp_path):
        page(run={})
        same = RunDirectory(tmp_path / "run" / ".." / "run")
        write_report([RunDirectory(tmp_path / "run"), same], tmp_path / "report.html")
        assert "(n = 2)" not in (tmp_path / "report.html").read_text()


class TestBadInput:
    def test_a_damaged_run_leaves_the_old_page(self, tmp_path):
        sound, damaged = fabricate(tmp_path / "sound"), fabricate(tmp_path / "damaged")
        damaged.metrics_file.write_text("nonsense\n")
        target = tmp_path / "report.html"
        target.write_text("the old one")
        with pytest.raises(RunDirectoryError, match=r"damaged/metrics\.jsonl is damaged"):
            write_report([sound, damaged], target)
        assert target.read_text() == "the old one"

    def test_no_run(self, tmp_path):
        with pytest.raises(RunDirectoryError, match="holds no run"):
            write_report([RunDirectory(tmp_path)], tmp_path / "report.html")
        with pytest.raises(ValueError, match="at least one run"):
            write_report([], tmp_path / "report.html")

    def test_a_full_disk_leaves_nothing_behind(self, tmp_path, monkeypatch):
        run = fabricate(tmp_path / "run")

        def full(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("os.fsync", full)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(OSError, match="No space left"):
            write_report([run], tmp_path / "report.html")
        assert sorted(tmp_path.iterdir()) == before


def _chromium():
    """The browser of this machine, if it has one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    named = [os.environ.get("CHROMIUM"), *names]
    cached = Path.home().glob(".cache/ms-playwright/*/*/*")  # Playwright's own browsers
    programs = [str(path) for path in cached if path.name in ("chrome", "headless_shell", "chrome-headless-shell")]
    return next(filter(None, (shutil.which(name) for name in [*named, *programs] if name)), None)


@pytest.mark.skipif(_chromium() is None, reason="no Chromium found: install one, or set CHROMIUM to its path")
class TestInABrowser:
    """A frame as wide as a phone, since a browser's window may not become that narrow."""

    FRAME = """<!DOCTYPE html><title>nothing measured</title>
    <script>addEventListener("message", event => { document.title = event.data; });</script>
    <iframe src="measured.html" style="border: 0; width: 390px; height: 844px"></iframe>"""
    MEASURE = """<script>addEventListener("load", () => {
      const shown = [...document.querySelectorAll("svg, .scroll, h2, p")];
      parent.postMessage(JSON.stringify({
        page: document.documentElement.scrollWidth,
        frame: document.documentElement.clientWidth,
        widest: Math.max(...shown.map(e => Math.ceil(e.getBoundingClientRect().right))),
        tables: document.querySelectorAll("table").length,
        pictures: [...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().height > 100).length,
        title: document.title,
      }), "*");
    });</script></body>"""

    def dom(self, page, *options):
        profile = page.parent / "profile"
        command = [
            _chromium(),
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            *options,
        ]
        result = subprocess.run(
            [*command, "--window-size=390,844", page.as_uri()], capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stderr
        return result

    def measured(self, directory, html):
        """What a browser says of a page; measuring it takes a script, which the page itself forbids."""
        html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
        (directory / "measured.html").write_text(html.replace("</body>", self.MEASURE))
        frame = directory / "frame.html"
        frame.write_text(self.FRAME)
        dom = self.dom(frame, "--dump-dom", "--virtual-time-budget=5000").stdout
        return json.loads(unescape(re.search("<title>(.*?)</title>", dom)[1]))

    def test_fits_a_phone(self, many, tmp_path):
        found = self.measured(tmp_path, many)
        assert found["frame"] == 390
        assert found["page"] == 390
        assert found["widest"] <= 390
        assert found["tables"] > len(MANY)
        assert found["pictures"] >= 3 + 4  # curves, then layers of each private group

    def test_the_measurement_can_fail(self, tmp_path):
        wide = "<!DOCTYPE html><title>wide</title><body><p style='width: 900px'>wide</p></body>"
        assert self.measured(tmp_path, wide)["page"] > 390

    def test_nothing_runs_and_nothing_is_refused(self, page, tmp_path):
        page(run={"model": HOSTILE, "layers": [layer(HOSTILE, gains=[2.0, 1.0, 0.5, 0.0])]}, has_pictures=True)
        result = self.dom(tmp_path / "report.html", "--dump-dom", "--enable-logging=stderr")
        assert "<table" in result.stdout
        assert "<title>broken</title>" not in result.stdout
        assert "CONSOLE" not in result.stderr, "the browser complained about the page"

    def test_a_script_would_be_refused(self, page, tmp_path):
        """The control of the test above, and of the page's own defence."""
        html = page(run={}).replace("</body>", '<script>document.title = "broken"</script></body>')
        (tmp_path / "report.html").write_text(html)
        result = self.dom(tmp_path / "report.html", "--dump-dom", "--enable-logging=stderr")
        assert "<title>broken</title>" not in result.stdout
        assert "CONSOLE" in result.stderr

    def test_it_can_be_seen(self, many, tmp_path):
        (tmp_path / "report.html").write_text(many)
        picture = tmp_path / "page.png"
        self.dom(tmp_path / "report.html", f"--screenshot={picture}")
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 10_000  # an empty page takes some two thousand
