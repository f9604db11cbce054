"""The examples run and say what the documentation says they say."""

import os
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from spectral_dp import SpectralConfig
from tests.support.processes import Processes

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_mechanism_example_prints_and_draws(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["mechanism.py"])
    runpy.run_path(str(EXAMPLES / "mechanism.py"), run_name="__main__")
    assert "(2.75, 1e-05)-DP" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["mechanism.py", "--figure", str(tmp_path / "figure.png")])
    runpy.run_path(str(EXAMPLES / "mechanism.py"), run_name="__main__")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_every_sharp_edge_cuts_as_the_page_says(monkeypatch, capsys):
    edges = runpy.run_path(str(EXAMPLES / "sharp_edges.py"))
    page = (EXAMPLES.parent / "docs/sharp-edges.md").read_text()
    for name, edge in edges["EDGES"].items():
        edge()
        said = "REFUSED" if edge in edges["REFUSED"] else "NOT COVERED"
        assert capsys.readouterr().out.startswith(said), name
        assert f"| `{name}` |" in page


def test_the_figures_of_the_mechanism_are_drawn(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["mechanism_steps.py", "--figures", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "mechanism_steps.py"), run_name="__main__")
    for name in ("steps", "attackers"):
        assert (tmp_path / f"mechanism_{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_training_example_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--seeds", "1", "--epochs", "1"])
    runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
    assert "Spectral-DP" in capsys.readouterr().out


def test_the_example_of_priors_prints_and_draws(monkeypatch, capsys, tmp_path):
    """Barcodes look like nothing that the prior draws: its axes reach far less of them."""
    arguments = ["--atoms", "64", "--images", "400", "--figures", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["priors.py", *arguments])
    runpy.run_path(str(EXAMPLES / "priors.py"), run_name="__main__")
    printed = capsys.readouterr().out
    share = {name: int(re.search(rf"{name}.*?([0-9]+) %", printed)[1]) for name in ("another seed", "barcodes")}
    assert share["another seed"] > 2 * share["barcodes"]
    for name in ("images", "patches", "spectrum"):
        assert (tmp_path / f"priors_{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--mixes-records"], 1)])
def test_a_model_of_ones_own_is_audited(arguments, code, monkeypatch, capsys, few_batches):
    monkeypatch.setattr(sys, "argv", ["audit_own_model.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "audit_own_model.py"), run_name="__main__")
    assert ended.value.code == code
    printed = capsys.readouterr().out
    assert "linear map: holds" in printed
    assert ("neighbours: VIOLATION" in printed) == bool(code)


def test_the_distributed_example_runs_and_goes_on(tmp_path):
    """As two ranks, whose group is already there; then, with the same checkpoint, for longer and as one process."""
    pool, path = Processes(), tmp_path / "run.pt"
    try:
        for epochs in (1, 2):
            example = [str(EXAMPLES / "distributed.py"), 1.0, epochs, path]
            first, second = pool.run(2, "tests.support.rank_programs:example", *example)
            assert first == second
            assert first[0] > 0.3
            assert first[1] <= 1.0
            path = None  # another number of epochs has other noise, so the checkpoint is not one of that run
    finally:
        pool.stop()


@pytest.mark.slow
def test_the_distributed_example_restarts_by_itself_under_torchrun(tmp_path):
    """A rank is killed in the middle; torchrun starts all of them again, and they go on from the checkpoint."""
    killer = tmp_path / "killed.py"
    killer.write_text(
        "import os, runpy, sys\nfrom spectral_dp import PrivacyEngine\n"
        "load, restarts = PrivacyEngine.save_checkpoint, int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "def save(self, **options):\n"
        "    load(self, **options)\n"
        "    if os.environ['RANK'] == '1' and restarts == 0: os.kill(os.getpid(), 9)\n"
        "PrivacyEngine.save_checkpoint = save\n"
        f"sys.argv[0] = {str(EXAMPLES / 'distributed.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(killer), "--epochs", "2", "--checkpoint", str(tmp_path / "run.pt")]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see docs/distributed.md
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 processes: accuracy" in done.stdout
    assert "epsilon 1.000" in done.stdout or "epsilon 0.99" in done.stdout


def _accuracy(name, arguments, monkeypatch, capsys):
    """Of the model at the end, in percent."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert "epsilon 3.00 at delta" in printed
    return float(re.findall(r"([0-9.]+)%", printed)[-1])


@pytest.mark.filterwarnings("ignore")  # the packages of others, about each other and about this machine
def test_text_with_transformers_is_learnt(monkeypatch, capsys):
    pytest.importorskip("transformers", reason="needs the extra spectral-dp[transformers]")
    pytest.importorskip("peft", reason="needs the extra spectral-dp[peft]")
    assert _accuracy("transformers_text.py", ["--generated", "--epochs", "1"], monkeypatch, capsys) > 80


@pytest.mark.filterwarnings("ignore")
def test_images_with_lightning_are_learnt(monkeypatch, capsys):
    pytest.importorskip("lightning", reason="needs the extra spectral-dp[lightning]")
    assert _accuracy("lightning_images.py", ["--epochs", "10"], monkeypatch, capsys) > 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "example"),
    [
        ("transformers", ["transformers_text.py", "--generated", "--epochs", "1"]),
        ("lightning", ["lightning_images.py", "--epochs", "1", "--processes", "2"]),
    ],
)
def test_trainers_run_under_torchrun(package, example):
    """Two processes spend one budget, and the first of them alone tells of it."""
    pytest.importorskip(package, reason=f"needs the extra spectral-dp[{package}]")
    pytest.importorskip("peft", reason="needs the extra spectral-dp[peft]")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    name, *options = example
    done = subprocess.run([*command, str(EXAMPLES / name), *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epsilon 3.00 at delta") == 1


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
