"""Train a small network privately on generated images: plain DP-SGD and Spectral-DP at the same epsilon.

    python examples/train.py [--epsilon 1.0] [--epochs 5] [--seeds 3]

The images are smooth class patterns under heavy pixel noise, made up so that no download is needed and the run takes
seconds. That suits a low-pass filter by construction: the table shows how the library is used and that filtering
removes noise where the signal is smooth, not what to expect on your data. Noise and batches are seeded so that the
table can be reproduced; a real run leaves the seed out.
"""

import argparse
import statistics

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine, SpectralConfig

SIZE, CLASSES, BATCH, DELTA = 16, 4, 200, 1e-5


def smooth_images(count: int, generator: torch.Generator) -> TensorDataset:
    coarse = torch.randn(CLASSES, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(coarse, size=SIZE, mode="bicubic")
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(patterns[labels] + 3 * torch.randn(count, 1, SIZE, SIZE, generator=generator), labels)


def train(spectral: SpectralConfig, seed: int, epsilon: float, epochs: int) -> tuple[float, float]:
    """Returns accuracy on fresh images, and the epsilon spent."""
    generator = torch.Generator().manual_seed(seed)
    private_data, fresh = smooth_images(4000, generator), smooth_images(2000, generator)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    engine = PrivacyEngine(seed=seed, reproducibility_over_privacy=True)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(private_data, batch_size=BATCH),
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        spectral=spectral,
    )
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    with torch.no_grad():
        images, labels = fresh.tensors
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    return accuracy, engine.get_epsilon(DELTA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)  # for so small a model, several would spend their time waiting for each other
    layout = {"1": (1, SIZE, SIZE)}
    methods = {"DP-SGD": SpectralConfig.dpsgd()} | {
        f"Spectral-DP, ρ = {ratio}": SpectralConfig(linear_ratio=ratio, input_layouts=layout) for ratio in (0.5, 0.9)
    }
    runs = [(name, config, seed) for seed in range(args.seeds) for name, config in methods.items()]
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for name, config, seed in track(runs, description="training"):
        results[name].append(train(config, seed, args.epsilon, args.epochs))
    table = Table("method", "accuracy on fresh images", "epsilon spent", title=f"generated task, {args.seeds} seeds")
    for name, values in results.items():
        accuracies = [accuracy for accuracy, _ in values]
        spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
        table.add_row(name, f"{100 * statistics.mean(accuracies):.1f} ± {100 * spread:.1f} %", f"{values[0][1]:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
