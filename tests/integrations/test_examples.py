"""The examples of the integrations run offline, and learn."""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# The packages of others warn of each other's old ways.
pytestmark = pytest.mark.filterwarnings("default")


def accuracy(name, arguments, monkeypatch, capsys):
    """Of the model at the end, in percent."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert "epsilon 3.00 at delta" in printed
    return float(re.findall(r"([0-9.]+)%", printed)[-1])


def test_text_with_transformers(monkeypatch, capsys):
    pytest.importorskip("transformers", reason="needs the extra spectral-dp[transformers]")
    pytest.importorskip("peft", reason="needs the extra spectral-dp[peft]")
    assert accuracy("transformers_text.py", ["--generated", "--epochs", "3"], monkeypatch, capsys) > 80


def test_images_with_lightning(monkeypatch, capsys):
    pytest.importorskip("lightning", reason="needs the extra spectral-dp[lightning]")
    pytest.importorskip("sklearn", reason="needs the extra spectral-dp[cli]")
    assert accuracy("lightning_images.py", ["--epochs", "10"], monkeypatch, capsys) > 60
