"""kymatio is imported in one place, by the way in that works beside every SciPy."""

import subprocess
import sys
from pathlib import Path

import pytest

import spectral_dp
from spectral_dp.features import FeatureError
from spectral_dp.features.kymatio_filters import kymatio_transform


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
    lines = (Path(__file__).parents[2] / "pyproject.toml").read_text().splitlines()
    (extra,) = [line for line in lines if line.startswith("scattering = ")]
    assert "scipy" not in extra


@pytest.mark.slow
def test_the_extra_installs_beside_the_constraints(tmp_path):
    """Needs a package registry. kymatio goes into a directory of its own, so nothing else changes."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), "kymatio>=0.3"]
    installed = subprocess.run(pip, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"no package registry in reach: {installed.stderr[-200:]}")
    code = "from spectral_dp.features.kymatio_filters import kymatio_transform as k; print(len(k(2, 8, 2, (8, 8)).psi))"
    path = f"{tmp_path}:{':'.join(sys.path)}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert ran.stdout.strip() == "16", ran.stderr
