"""A block-circulant layer's share of a private step, as a ratio to the plain step of the dense layer it replaces.

    python benchmarks/bench_block_circulant.py [--repeats 25] [--threads 1]
    python benchmarks/bench_block_circulant.py --paths    # the basis of _prefers_dense and SHORT_BLOCK in layers.py

Ours: forward, input gradient, norms of the per-sample gradients, clipped sum. Dense: forward, input and weight
gradient of ``nn.Linear``, without any privacy. The goal: at most 0.8x. Measurements are interleaved, medians reported.
One thread by default: several wait for each other at every operation, and on a shared machine that is what is measured.
"""

import argparse
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from spectral_dp import layers
from spectral_dp.gradients.rules.block_circulant import BlockCirculantRule
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.uses import condense
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.clipping import clip_factors
from spectral_dp.mechanism.filters import LowPassFilter


def interleaved(contestants, repeats):
    times = {key: [] for key in contestants}
    for _ in track(range(repeats + 2), description="measuring", transient=True):
        for key, run in contestants.items():
            start = perf_counter()
            run()
            times[key].append(perf_counter() - start)
    return {key: values[2:] for key, values in times.items()}


def forward_backward(layer, x, dA):
    x.grad = None
    layer(x).backward(dA)


def plain_step(layer, x, dA):
    layer.weight.grad = layer.bias.grad = None
    forward_backward(layer, x, dA)


def private_step(rule, x, dA):
    rule.module.requires_grad_(False)  # as the recorder does: no plain weight gradients
    forward_backward(rule.module, x, dA)
    rule.module.requires_grad_(True)
    with torch.no_grad():
        use = condense(rule, x, dA)
        use.clipped_sums(clip_factors(use.squared_norms().sqrt(), 1.0))


def against_dense(batch, n, m, d, repeats):
    x, dA = torch.randn(batch, n, requires_grad=True), torch.randn(batch, m)
    linear, layer = nn.Linear(n, m), BlockCirculantLinear(n, m, d)
    contestants = {"dense, plain": lambda: plain_step(linear, x, dA)}
    for ratio in (0.0, 0.5):
        rule = BlockCirculantRule(layer, LayerConfig(LowPassFilter(ratio)))
        contestants[f"block {d}, ratio {ratio}"] = lambda rule=rule: private_step(rule, x, dA)
    times = interleaved(contestants, repeats)
    reference = next(iter(times.values()))
    table = Table("step", "ms", "x dense", title=f"{n} -> {m}, batch {batch}, float32")
    for key, values in times.items():
        ratio = median(t / r for t, r in zip(values, reference, strict=True))
        table.add_row(key, f"{median(values) * 1e3:.1f}", f"{ratio:.2f}")
    return table


def paths(repeats):
    """Forward and input gradient by each path, whatever the layer would choose."""
    table = Table("layer", "batch", "d", "matrix / dense", "FFT / dense", "chosen", title="paths of the layer")
    for n, m in [(160, 10), (160, 160), (512, 128), (784, 512), (1024, 1024), (2048, 1024), (16384, 10)]:
        for batch in (16, 1024):
            for d in (2, 4, 8, 16, 32, 64, 128):
                layer = BlockCirculantLinear(n, m, d).requires_grad_(False)
                x, dA = torch.randn(batch, n, requires_grad=True), torch.randn(batch, m)

                def run(dense, short, layer=layer, x=x, dA=dA):
                    with (
                        patch.object(layers, "_prefers_dense", lambda *_: dense),
                        patch.object(layers, "SHORT_BLOCK", short),
                    ):
                        forward_backward(layer, x, dA)

                contestants = {
                    "dense": lambda run=run: run(True, 0),
                    "matrix": lambda run=run: run(False, 10**6),
                    "FFT": lambda run=run: run(False, 0),
                }
                times = {key: median(values) for key, values in interleaved(contestants, repeats).items()}
                dense = layers._prefers_dense(*layer.weight.shape)
                chosen = "dense" if dense else "matrix" if d <= layers.SHORT_BLOCK else "FFT"
                ratios = [f"{times[key] / times['dense']:.2f}" for key in ("matrix", "FFT")]
                table.add_row(f"{n} -> {m}", str(batch), str(d), *ratios, chosen)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--paths", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Console().print(paths(args.repeats) if args.paths else against_dense(1024, 2048, 1024, 8, args.repeats))


if __name__ == "__main__":
    main()
