"""The library stands alone: without the packages of the extra it is imported, trains and audits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from spectral_dp.__main__ import EXTRA

ROOT = Path(__file__).parents[1]
APPLICATION = ("models", "data", "experiments", "cli", "__main__")

BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({[*EXTRA, 'click', 'opacus']!r}))\n"

ROOMS = """
import spectral_dp
assert "torch" not in sys.modules and "numpy" not in sys.modules
spectral_dp.accounting.calibrate_noise, spectral_dp.audit.run_audit, spectral_dp.layers
print("the rooms are attributes")
"""

IMPORTS = f"""
import importlib, pkgutil
for info in pkgutil.walk_packages(spectral_dp.__path__, "spectral_dp."):
    if info.name.split(".")[1] not in {APPLICATION!r}:
        importlib.import_module(info.name)
"""

AUDIT = """
from spectral_dp import audit
claim = audit.Claim(noise_multiplier=1.1, max_grad_norm=1.0, expected_batch_size=8, sample_rate=0.1, steps=10)
model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
effort = audit.Effort(1, canary_blocks=2, per_block=4, scores=200, run_scores=4, steps=4, noise_steps=4, calls=20)
report = audit.run_audit(audit.SpectralTarget(model, claim, input_shape=(1, 6, 6)), effort=effort, confidence=0.9999)
print(report)
"""


def run(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def without():
    """One process for all that must go well, since it imports torch. The training is that of the README."""
    training = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    return run(BLOCKED + ROOMS + IMPORTS + "\n".join(training) + AUDIT)


def test_it_is_imported_trains_and_audits(without):
    assert without.returncode == 0, without.stderr
    assert "epsilon = 2.00" in without.stdout
    assert "no violation found" in without.stdout


def test_the_rooms_are_attributes_before_anybody_has_imported_them(without):
    """Not only after a name that happens to live there: ``spectral_dp.accounting.calibrate_noise`` just works."""
    assert "the rooms are attributes" in without.stdout, without.stderr
    assert not hasattr(sys.modules["spectral_dp"], "no_such_room")


def test_negative_control_the_block_holds():
    result = run(BLOCKED + "import spectral_dp.cli")
    assert result.returncode != 0
    assert "typer" in result.stderr
