"""The command: it starts without torch, and without the extra it says how to get it."""

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from spectral_dp.__main__ import EXTRA

ROOT = Path(__file__).parents[1]
MNIST = ["budget", "--samples", "60000", "--batch-size", "1024", "--epochs", "3"]


def run(arguments, before="", after="pass"):
    """The command in a process of its own, with statements before it and after it."""
    code = f"""
import sys
{before}
from spectral_dp.__main__ import main
try:
    main()
finally:
    {after}
"""
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([command, "--help"] for command in ("audit", "budget", "compare", "data", "report", "reproduce", "train")),
        [*MNIST, "--noise-multiplier", "2"],
    ],
    ids=" ".join,
)
def test_no_torch_where_none_is_needed(arguments):
    """Torch takes seconds to import: somebody who asks for help need not wait for it."""
    result = run(arguments, after="print(*sys.modules, file=sys.stderr)")
    assert result.returncode == 0
    loaded = set(result.stderr.split())
    assert not loaded & {"torch", "matplotlib", "sklearn", "safetensors", "PIL", "cryptography"}
    assert "typer" in loaded, "it is seen what is loaded"
    assert ("scipy.signal" in loaded) == ("--help" not in arguments)


@pytest.mark.parametrize("asks", [False, True])
def test_an_engine_is_there_without_what_only_accounting_takes(asks):
    """dp_accounting and scipy.signal take a second to import: training need not wait for them, epsilon may."""
    code = "import sys; from spectral_dp import PrivacyEngine, accounting\n"
    code += "accounting.epsilon(1.0, 0.01, 10, 1e-5, accountant='rdp')\n" if asks else ""
    code += "print('dp_accounting' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout.strip() == str(asks)


def test_negative_control_torch_is_seen():
    result = run(["--help"], before="from spectral_dp import perturb", after="print(*sys.modules, file=sys.stderr)")
    assert "torch" in result.stderr.split()


@pytest.mark.parametrize("missing", [EXTRA, ["sklearn"]], ids=["all", "one"])
@pytest.mark.parametrize("arguments", [[], ["--help"], MNIST], ids=["nothing", "help", "budget"])
def test_without_the_extra_one_line_says_how_to_get_it(arguments, missing):
    result = run(arguments, before=f"sys.modules.update(dict.fromkeys({missing!r}))")
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("pip install 'spectral-dp[cli]'")
    assert ", ".join(missing) in line


def test_the_extra_is_what_is_looked_for():
    """Catches a package that the command needs, the extra brings and nobody looks for, and the other way round."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    distributions = packages_distributions()
    assert sorted(distributions[name][0] for name in EXTRA) == sorted(each.partition(">")[0] for each in extras["cli"])
