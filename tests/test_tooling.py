"""The Makefile, the hosted CI and the package's metadata say the same."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

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
    needed = [*PROJECT["dependencies"], *extras["cli"], *extras["baseline"], *extras["dev"]]
    names = {re.match(r"[\w-]+", each).group().replace("-", "_").lower() for each in needed} - {"spectral_dp"}
    assert names <= {name.replace("-", "_").lower() for name in pinned}
