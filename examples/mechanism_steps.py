"""Draw the figures of docs/mechanism.md: one release step by step, and what epsilon leaves to an attacker.

python examples/mechanism_steps.py --figures docs
"""

import argparse
import math
from pathlib import Path

import matplotlib
import torch

from spectral_dp import LowPassFilter, SeededNoise, get_transform, perturb_sum
from spectral_dp.accounting import calibrate_noise
from spectral_dp.accounting.ledger import Ledger
from spectral_dp.accounting.membership import guarantees_of, largest_detection_rate

matplotlib.use("Agg")
from matplotlib import pyplot as plt

N, RECORDS, BOUND, SIGMA, RATIO = 32, 60, 1.0, 3.0, 0.7


def records() -> torch.Tensor:
    """Smooth vectors of different lengths, one for each record."""
    generator = torch.Generator().manual_seed(3)
    t = torch.linspace(0, 2 * math.pi, N + 1)[:-1]
    shared = torch.sin(t) + 0.4 * torch.cos(2 * t)
    lengths = torch.rand(RECORDS, 1, generator=generator) * 0.6
    return lengths * (shared + 0.8 * torch.randn(RECORDS, N, generator=generator))


def draw_steps(path: Path) -> None:
    g, dct = records(), get_transform("dct")
    gains = LowPassFilter(RATIO).gains(dct, N)
    g = g[g.norm(dim=1).argsort(descending=True)]  # the first is the longest, and shown
    z = gains.pre * dct.forward(g)
    norms = z.norm(dim=1)
    clipped = z / (norms / BOUND).clamp(min=1)[:, None]
    release = perturb_sum(
        g, max_norm=BOUND, noise_multiplier=SIGMA, filter_ratio=RATIO, transform="dct",
        noise=SeededNoise(1, reproducibility_over_privacy=True),
    )  # fmt: skip
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.6), layout="constrained")
    kept = gains.post > 0
    for ax, values, title in (
        (axes[0, 0], dct.forward(g)[0], "1. transform one record"),
        (axes[0, 1], z[0], f"2. filter: {int(kept.sum())} of {N} coordinates stay"),
    ):
        ax.bar(range(N), values.numpy(), color=["tab:blue" if k else "tab:gray" for k in kept])
        ax.set(title=title, xlabel="frequency", ylim=(-3.2, 3.2))
    axes[1, 0].hist([norms.numpy(), clipped.norm(dim=1).numpy()], bins=16, label=["before", "after"])
    axes[1, 0].axvline(BOUND, color="black", ls="--", lw=1)
    axes[1, 0].set(title="3. clip: no record is longer than C", xlabel="length of a record")
    axes[1, 0].legend()
    axes[1, 1].plot(g.sum(0).numpy(), "k--", lw=1, label="true sum")
    axes[1, 1].plot(dct.inverse(clipped.sum(0)).numpy(), color="tab:orange", label="filtered, clipped")
    axes[1, 1].plot(release.numpy(), color="tab:blue", label="released")
    axes[1, 1].set(title="4. sum, add noise once, transform back", xlabel="position")
    axes[1, 1].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def draw_attackers(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5.2, 4.2), layout="constrained")
    alarms = [i / 200 for i in range(201)]
    rate, steps = 1024 / 60_000, 1740
    for target in (8.0, 3.0, 1.0, 0.3):
        ledger = Ledger()
        ledger.record(calibrate_noise(target, 1e-5, rate, steps), rate, steps)
        guarantees = guarantees_of(ledger)
        axes.plot(alarms, [largest_detection_rate(guarantees, a) for a in alarms], label=f"epsilon {target:g}")
    axes.plot([0, 1], [0, 1], "k:", label="a coin")
    axes.set(
        xlabel="others that are taken for members",
        ylabel="members that are recognised, at most",
        title="What no attack exceeds (30 epochs, batch 1024 of 60,000)",
    )
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, default=Path("docs"), help="directory to draw into")
    folder = parser.parse_args().figures
    draw_steps(folder / "mechanism_steps.png")
    draw_attackers(folder / "mechanism_attackers.png")
    print(f"mechanism_steps.png and mechanism_attackers.png in {folder}")


if __name__ == "__main__":
    main()
