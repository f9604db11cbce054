"""Features a second of every pretrained network, beside the same network in plain PyTorch.

    python benchmarks/bench_backbones.py [NAME ...] [--image-size 128] [--repeats 5] [--out FILE.json]

The goal: at most 1.05x the time of plain PyTorch, which resizes, normalises and runs the network in evaluation mode, on
the same batches of 16. Weights are random numbers, which cost the same as others; measurements are interleaved, the
median of the ratios of neighbours is reported.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from made_by import made_by
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch.nn import functional as F

from spectral_dp.features import Backbone
from spectral_dp.files import write_json
from spectral_dp.pretrained import NAMES, find_architecture, find_weights

GOAL, BATCH, PIECES = 1.05, 16, 128


def timed(run) -> float:
    began = perf_counter()
    run()
    return perf_counter() - began


def contestants(name: str, image_size: int, directory: Path):
    """Returns ours and plain PyTorch, each a function of nothing that computes the features of one batch."""
    architecture = find_architecture(name)
    file = directory / f"{name}.safetensors"
    save_file(architecture.build().state_dict(), file)
    weights = find_weights(name, file)
    network = weights.network()
    if architecture.reads == "text":
        (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")))
        pieces = torch.randint(1, 30_000, (BATCH, PIECES), dtype=torch.int32)
        module = Backbone(weights, length=PIECES).module((PIECES,))
        return (lambda: module(pieces)), (lambda: network.pooled(pieces.long()))
    side = min(image_size, 4 * architecture.image_size) if architecture.image_size > 32 else 32
    images = torch.randint(0, 256, (BATCH, 3, 32, 32), dtype=torch.uint8)
    module = Backbone(weights, side).module((3, 32, 32))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (weights.mean, weights.std))

    def plain():
        pixels = F.interpolate(images.float() / 255, (side, side), mode="bilinear", antialias=True)
        return network.pooled((pixels - mean) / std)

    return (lambda: module(images)), plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"networks, of {', '.join(NAMES)}")
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        for name in args.names or NAMES:
            ours, plain = contestants(name, args.image_size, Path(directory))
            pairs = [(timed(ours), timed(plain)) for _ in range(args.repeats + 1)][1:]
            found[name] = {
                "features_per_second": BATCH / median(own for own, _ in pairs),
                "plain_per_second": BATCH / median(other for _, other in pairs),
                "ratio": median(own / other for own, other in pairs),
            }
    heading = f"images of {args.image_size} px (32 for those of CIFAR), {torch.get_num_threads()} threads"
    table = Table("network", "features / s", "plain / s", f"time / plain (at most {GOAL})", title=heading)
    for name, facts in found.items():
        table.add_row(
            name, *(f"{facts[key]:.1f}" for key in ("features_per_second", "plain_per_second")), f"{facts['ratio']:.2f}"
        )
    Console().print(table)
    if args.out is not None:
        write_json(args.out, {"image_size": args.image_size, "networks": found, "made_by": made_by()})


if __name__ == "__main__":
    main()
