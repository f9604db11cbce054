"""The examples run and say what the documentation says they say."""

import runpy
import statistics
import sys
from pathlib import Path

import pytest

from spectral_dp import SpectralConfig

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_mechanism_example_prints_and_draws(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["mechanism.py"])
    runpy.run_path(str(EXAMPLES / "mechanism.py"), run_name="__main__")
    assert "(2.75, 1e-05)-DP" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["mechanism.py", "--figure", str(tmp_path / "figure.png")])
    runpy.run_path(str(EXAMPLES / "mechanism.py"), run_name="__main__")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_training_example_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--seeds", "1", "--epochs", "1"])
    runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
    assert "Spectral-DP" in capsys.readouterr().out


@pytest.mark.slow
def test_filtering_gains_where_the_signal_is_smooth():
    """Paired over ten seeds, at the same epsilon: the difference is well above its standard error."""
    example = runpy.run_path(str(EXAMPLES / "train.py"))
    filtered = SpectralConfig(linear_ratio=0.9, input_layouts={"1": (1, 16, 16)})
    gains = [
        example["train"](filtered, seed, 1.0, 5)[0] - example["train"](SpectralConfig.dpsgd(), seed, 1.0, 5)[0]
        for seed in range(10)
    ]
    assert statistics.mean(gains) > 3 * statistics.stdev(gains) / len(gains) ** 0.5
    assert statistics.mean(gains) > 0.01
