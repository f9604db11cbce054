"""Release one smooth signal under differential privacy, with more and more of its spectrum filtered out.

    python examples/mechanism.py [--figure noise_spectrum.png]

Prints, for each filtering ratio, the noise left (predicted by Proposition 1 and measured) and the error of the release.
The privacy is the same in every row. The noise is seeded so that the table can be reproduced; a real release
leaves `noise` out and gets a cryptographic source.
"""

import argparse
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from spectral_dp import LowPassFilter, SeededNoise, get_transform, perturb, perturb_sum
from spectral_dp.accounting import gaussian_epsilon

N, SENSITIVITY, NOISE_MULTIPLIER, DELTA, RUNS = 256, 1.0, 1.5, 1e-5, 2000
RATIOS = (0.0, 0.5, 0.75, 0.9)


def smooth_signal() -> torch.Tensor:
    t = torch.linspace(0, 2 * math.pi, N + 1)[:-1]
    signal = torch.sin(t) + 0.5 * torch.cos(3 * t) + 0.25 * torch.sin(5 * t + 1)
    return signal / signal.norm() * SENSITIVITY


def release(query: torch.Tensor, ratio: float) -> torch.Tensor:
    noise = SeededNoise(0, reproducibility_over_privacy=True)
    return perturb(
        query.expand(RUNS, N),
        sensitivity=SENSITIVITY,
        noise_multiplier=NOISE_MULTIPLIER,
        filter_ratio=ratio,
        batch_dims=1,
        noise=noise,
    )


def print_table() -> None:
    query = smooth_signal()
    epsilon = gaussian_epsilon(NOISE_MULTIPLIER, DELTA)
    table = Table(
        "ratio asked",
        "ratio dropped",
        "noise variance (Prop. 1)",
        "measured",
        "RMS error of the release",
        title=f"one release of {N} numbers, every row ({epsilon:.2f}, {DELTA:g})-DP",
    )
    for ratio in RATIOS:
        gains = LowPassFilter(ratio).gains(get_transform("fourier"), N)
        scale = (NOISE_MULTIPLIER * SENSITIVITY) ** 2
        error = release(query, ratio) - query
        table.add_row(
            f"{ratio:.2f}",
            f"{gains.effective_ratio:.3f}",
            f"{gains.noise_variance * scale:.3f}",
            f"{error.var().item():.3f}",
            f"{error.square().mean().sqrt().item():.3f}",
        )
    Console().print(table)


def draw_figure(path: Path) -> None:
    """The noise spectrum before and after filtering, measured from releases of a zero query."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for ratio, colour in ((0.0, "tab:gray"), (0.5, "tab:orange"), (0.9, "tab:blue")):
        power = torch.fft.rfft(release(torch.zeros(N), ratio), norm="ortho").abs().square().mean(0)
        kept = LowPassFilter(ratio).gains(get_transform("fourier"), N)
        name = "no filter" if ratio == 0 else f"ρ = {ratio}"
        left.plot(power, color=colour, label=f"{name}: {kept.noise_variance:.0%} of the noise")
    left.set(xlabel="frequency", ylabel="noise power", ylim=(0, None), title="Spectrum of the released noise")
    left.legend(loc="lower left", fontsize="small")
    records = smooth_signal().expand(40, N)  # forty people with the same pattern; each counts at most the sensitivity
    for ratio, colour in ((0.0, "tab:gray"), (0.9, "tab:blue")):
        noise = SeededNoise(0, reproducibility_over_privacy=True)
        out = perturb_sum(
            records, max_norm=SENSITIVITY, noise_multiplier=NOISE_MULTIPLIER, filter_ratio=ratio, noise=noise
        )
        right.plot(out, color=colour, lw=1, label="no filter" if ratio == 0 else f"ρ = {ratio}")
    right.plot(records.sum(0), color="black", lw=1, ls="--", label="true sum")
    epsilon = gaussian_epsilon(NOISE_MULTIPLIER, DELTA)
    right.set(xlabel="position", title=f"Sum over 40 records, both released at ε = {epsilon:.2f}")
    right.legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="draw the noise spectrum to this PNG instead of printing")
    figure = parser.parse_args().figure
    if figure is None:
        print_table()
    else:
        draw_figure(figure)


if __name__ == "__main__":
    main()
