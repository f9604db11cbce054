"""kymatio is imported in one place, by the way in that works beside every SciPy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import spectral_dp
from spectral_dp.features import FeatureError
from spectral_dp.features.kymatio_filters import kymatio_transform

ROOT = Path(__file__).parents[2]


def test_the_transform_is_kymatios():
    pytest.importorskip("kymatio")
    transform = kymatio_transform(2, 8, 2, (8, 8))
    assert type(transform).__name__ == "ScatteringTorch2D"
    assert len(transform.psi) == 16


def test_without_kymatio_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "kymatio.scattering2d.frontend.torch_frontend", None)
    with pytest.raises(FeatureError, match=r"pip install 'spectral-dp\[scattering\]'"):
        kymatio_transform(2, 8, 2, (8, 8))


def test_no_other_module_imports_it():
    source = Path(spectral_dp.__file__).parent
    importing = [
        p.name for p in source.rglob("*.py") if "from kymatio" in (text := p.read_text()) or "import kymatio\n" in text
    ]
    assert importing == ["kymatio_filters.py"]


def test_the_extra_does_not_bind_scipy():
    """Catches the bound that made the extra impossible to install beside constraints.txt."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    (extra,) = [line for line in lines if line.startswith("scattering = ")]
    assert "scipy" not in extra


def test_the_extra_binds_kymatio():
    """Catches wavelets of another design in a cache that was begun with these: no description names them."""
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    (extra,) = [line for line in lines if line.startswith("scattering = ")]
    assert "kymatio>=0.3,<0.4" in extra


def pip_install(*arguments):
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path):
    """A copy of what pip needs of the project, so that building it leaves nothing in the tree."""
    if pip_install("--dry-run", "--ignore-installed", "--no-deps", "kymatio>=0.3,<0.4").returncode:
        pytest.skip("no package registry in reach")
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return tmp_path


@pytest.mark.slow
def test_the_extra_installs_beside_the_constraints_and_works(project, tmp_path_factory):
    """Needs a package registry. What the extra adds goes into a directory of its own, so nothing else changes."""
    report, target = project / "report.json", tmp_path_factory.mktemp("extra")
    constrained = ["--constraint", project / "constraints.txt", f"{project}[scattering]"]
    resolved = pip_install("--dry-run", "--report", report, *constrained)
    assert resolved.returncode == 0, resolved.stderr
    found = [
        (entry["metadata"]["name"], entry["metadata"]["version"]) for entry in json.loads(report.read_text())["install"]
    ]
    added = [f"{name}=={version}" for name, version in found if name != "spectral-dp"]  # the rest is installed already
    if added:
        installed = pip_install("--no-deps", "--target", target, *added)
        assert installed.returncode == 0, installed.stderr
    code = "from spectral_dp.features.kymatio_filters import kymatio_transform as k; print(len(k(2, 8, 2, (8, 8)).psi))"
    path = os.pathsep.join([str(target), *sys.path])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert ran.stdout.strip() == "16", ran.stderr


@pytest.mark.slow
def test_negative_control_a_bound_against_the_constraints_does_not_install(project):
    """Else the test above would see nothing: with this bound the extra could not be installed at all."""
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(
        text.replace('scattering = ["kymatio', 'scattering = ["scipy<1.17", "kymatio')
    )
    resolved = pip_install("--dry-run", "--constraint", project / "constraints.txt", f"{project}[scattering]")
    assert resolved.returncode != 0
    assert "conflicting dependencies" in resolved.stderr
