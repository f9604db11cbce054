"""Norms + clipped sums of convolutions, as ratios to PyTorch's own weight gradient on the same tensors.

    python benchmarks/bench_gradients.py [--batch 256] [--rounds 9]

The six layers are those of Model3. Goals: at most 2.5x for each and 1.8x for their sum. Rounds are interleaved and
medians reported; numbers are ratios within one run.
"""

import argparse
from statistics import median
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.conv import conv_rule
from spectral_dp.gradients.uses import condense
from spectral_dp.mechanism.filters import LowPassFilter

LAYERS = [(3, 32, 32), (32, 32, 32), (32, 64, 16), (64, 64, 16), (64, 128, 8), (128, 128, 8)]
SETTINGS = {
    "no filter": LayerConfig(),
    "4 of 9 kept": LayerConfig(LowPassFilter(0.5)),
    "6 of 9 kept": LayerConfig(LowPassFilter(0.3)),
    "signal support, ρ = 0.5": LayerConfig(LowPassFilter(0.5), support="signal"),
}


def native(module: nn.Conv2d, x: torch.Tensor, dA: torch.Tensor) -> None:
    torch.ops.aten.convolution_backward(
        dA, x, module.weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (False, True, False)
    )


def ours(rule, x: torch.Tensor, dA: torch.Tensor) -> None:
    use = condense(rule, x, dA)
    use.clipped_sums(use.squared_norms())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    times: dict[tuple[int, str], list[float]] = {}
    ways: dict[tuple[int, str], str] = {}
    with torch.no_grad():
        contestants = []
        for i, (c_in, c_out, size) in enumerate(LAYERS):
            module = nn.Conv2d(c_in, c_out, 3, padding=1, bias=False)
            x = torch.randn(args.batch, c_in, size, size)
            dA = torch.randn(args.batch, c_out, size, size)
            contestants.append(((i, "native"), lambda m=module, x=x, dA=dA: native(m, x, dA)))
            for name, config in SETTINGS.items():
                rule = conv_rule(module, config)
                contestants.append(((i, name), lambda r=rule, x=x, dA=dA: ours(r, x, dA)))
                if config.support == "kernel":
                    ways[i, name] = "materialise" if rule.forms(x, dA) else "gram"
        for _ in track(range(args.rounds + 1), description="measuring"):
            for key, run in contestants:
                start = perf_counter()
                run()
                times.setdefault(key, []).append(perf_counter() - start)
    middle = {key: median(values[1:]) for key, values in times.items()}
    table = Table(
        "layer", "native ms", *SETTINGS, title=f"norms + clipped sum / native weight gradient, batch {args.batch}"
    )
    for i, (c_in, c_out, size) in enumerate(LAYERS):
        reference = middle[i, "native"]
        cells = [f"{middle[i, name] / reference:.2f} {ways.get((i, name), '')}" for name in SETTINGS]
        table.add_row(f"{c_in}-{c_out} @ {size}x{size}", f"{reference * 1e3:.1f}", *cells)
    total = {name: sum(middle[i, name] for i in range(len(LAYERS))) for name in ("native", *SETTINGS)}
    ratios = [f"{total[name] / total['native']:.2f}" for name in SETTINGS]
    table.add_row("all six", f"{total['native'] * 1e3:.1f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
