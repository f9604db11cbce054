"""The Makefile, the hosted CI and the package's metadata say the same."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from spectral_dp._version import __version__
from spectral_dp.experiments.comparison import Comparison
from spectral_dp.experiments.results import differing
from spectral_dp.experiments.settings import Settings

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def make(*arguments):
    """What make prints; the copy of it that runs these tests must not speak to this one."""
    environment = {"PATH": "/usr/bin:/bin:/usr/local/bin"}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arguments", [(), ("help",)], ids=["nothing", "help"])
def test_make_lists_every_target(arguments):
    targets = re.search(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE).group(1).split()
    listed = dict(line.split(maxsplit=1) for line in make(*arguments).splitlines())
    assert list(listed) == targets
    assert all(listed.values())


def test_the_demonstration_compares_what_its_words_say():
    """Catches other budgets, data that must be fetched, and arms that differ in more than their comments admit."""
    assert "spectral-dp compare --config examples/demo.toml --seeds 5" in make("-n", "demo")
    given = tomllib.loads((ROOT / "examples/demo.toml").read_text())
    arms = given.pop("arms")
    demo = Comparison({label: Settings.from_dict(given | own).resolved() for label, own in arms.items()}, range(5))
    assert demo.baseline == "DP-SGD, pixels"
    assert {(s.dataset, s.model, s.epsilon, s.validation_size) for s in demo.settings.values()} == {
        ("digits", "linear", 3, 0)
    }
    assert [s.features for s in demo.settings.values()] == ["pixels", "patches", "patches"]  # neither needs an extra
    _, plain, ours = demo.settings.values()
    assert (plain.feature_power, ours.feature_power > 0) == (0, True)
    tuned = ["method", "epochs", "batch_size", "learning_rate"]
    assert sorted(differing([plain.to_dict(), ours.to_dict()])) == sorted(["feature_power", *tuned])


def test_another_python_can_be_chosen(tmp_path):
    assert f"python3.13 -m venv {tmp_path}/v" in make("-n", "test", "PYTHON=python3.13", f"VENV={tmp_path}/v")


def test_hosted_ci_runs_the_same_command_on_every_python_that_is_promised():
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    pythons = re.findall(r'"(3\.\d+)"', workflow)
    assert pythons == [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert PROJECT["requires-python"] == f">={pythons[0]}"
    assert "run: .ci/run" in workflow
    assert f"PYTHON ?= python{pythons[0]}" in MAKEFILE


def test_what_is_installed_is_pinned():
    """Catches a dependency whose newest version decides whether the README's commands work."""
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = PROJECT["optional-dependencies"]
    needed = [*PROJECT["dependencies"], *extras["cli"], *extras["baseline"], *extras["docs"], *extras["dev"]]
    names = {re.match(r"[\w-]+", each).group().replace("-", "_").lower() for each in needed} - {"spectral_dp"}
    assert names <= {name.replace("-", "_").lower() for name in pinned}


def test_the_version_is_stated_once():
    """pyproject.toml reads it, and the citation, which nothing reads it into, agrees."""
    assert "version" in PROJECT["dynamic"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)[1]
    assert cited == __version__
    stated = [path.name for path in (ROOT / "src").rglob("*.py") if f'"{__version__}"' in path.read_text()]
    assert stated == ["_version.py"]


def test_issue_forms_and_workflows_are_valid_yaml():
    yaml = pytest.importorskip("yaml")
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 4
    for form in forms:
        read = yaml.safe_load(form.read_text())
        assert form.name == "config.yml" or {"name", "description", "body"} <= set(read)
    for workflow in (ROOT / ".github/workflows").glob("*.yml"):
        assert yaml.safe_load(workflow.read_text())["jobs"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]


@pytest.mark.slow
def test_the_wheel_works_without_the_source_tree(tmp_path):
    """As `make release-check`, but with the packages of this environment, since tests have no network."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    made = subprocess.run(build, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target"]
    subprocess.run([*install, str(tmp_path / "installed"), str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    smoke = [sys.executable, str(ROOT / "release/smoke.py"), str(tmp_path)]
    done = subprocess.run(smoke, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "from installed: trained, accounted for, reported" in done.stdout
