"""Uses an installed spectral-dp as a stranger would, away from the source tree: train, account, report.

    python smoke.py WORKING_DIRECTORY

Run by release/check_wheel.py. It needs the extra `cli` and no network.
"""

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import spectral_dp
from spectral_dp import PrivacyEngine, SpectralConfig


def library() -> None:
    data = TensorDataset(torch.randn(200, 1, 6, 6), torch.randint(2, (200,)))
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 2))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=50),
        target_epsilon=2.0, target_delta=1e-4, epochs=1, max_grad_norm=1.0, spectral=SpectralConfig(conv_ratio=0.3),
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert 0 < engine.get_epsilon(1e-4) <= 2.0


def command_line(folder: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "spectral_dp", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    assert spectral_dp.__version__ in run("--version")
    assert "best-results" in run("reproduce", "--list")  # recipes are part of the package
    run(
        "train",
        "--dataset",
        "digits",
        "--train-size",
        "300",
        "--epochs",
        "1",
        "--delta",
        "0.001",
        "--out",
        "run",
        "--quiet",
    )
    assert "differential privacy" in (folder / "run" / "MODEL_CARD.md").read_text()
    run("report", "run", "--out", "report.html")
    assert "<html" in (folder / "report.html").read_text()


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    place = Path(spectral_dp.__file__).resolve()
    assert (place.parent / "py.typed").exists()
    assert "src" not in place.parts, f"this is the source tree: {place}"
    library()
    command_line(folder)
    print(f"spectral-dp {spectral_dp.__version__} from {place.parent.parent.name}: trained, accounted for, reported")


if __name__ == "__main__":
    main()
