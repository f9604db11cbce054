"""Cost of ``perturb`` on a query of ten million numbers, as a ratio to ``torch.randn`` + clip in the same run.

    python benchmarks/bench_mechanism.py [--size 10000000] [--repeats 9]

The goals: at most 2x for the identity and 4x for Fourier, at ratio 0. Measurements are interleaved, medians reported.
"""

import argparse
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from spectral_dp import SecureNoise, SeededNoise, perturb


def baseline(query: torch.Tensor) -> torch.Tensor:
    factor = (1.0 / torch.linalg.vector_norm(query)).clamp(max=1)
    return query * factor + torch.randn(query.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=10**7)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    query = torch.randn(args.size)
    sources = {"secure": SecureNoise(), "seeded": SeededNoise(0, reproducibility_over_privacy=True)}
    contestants = {("torch.randn + clip", "", ""): lambda: baseline(query)}
    for transform, ratio in (("identity", 0.0), ("fourier", 0.0), ("fourier", 0.5), ("dct", 0.0), ("dct", 0.5)):
        for name, noise in sources.items():

            def run(transform=transform, ratio=ratio, noise=noise):
                return perturb(
                    query, sensitivity=1.0, noise_multiplier=1.0, transform=transform, filter_ratio=ratio, noise=noise
                )

            contestants[transform, f"{ratio}", name] = run
    times: dict[tuple[str, ...], list[float]] = {key: [] for key in contestants}
    for _ in track(range(args.repeats + 1), description="measuring"):
        for key, run in contestants.items():
            start = perf_counter()
            run()
            times[key].append(perf_counter() - start)
    reference = median(next(iter(times.values()))[1:])
    table = Table("transform", "ratio", "noise", "ms", "x baseline", title=f"perturb, {args.size:,} numbers")
    for key, values in times.items():
        t = median(values[1:])
        table.add_row(*key, f"{t * 1e3:.0f}", f"{t / reference:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
