"""Cost of training heads on cached features: an epoch of the linear head against the memory, a step of the CNN against
plain PyTorch, both also on projected features, the scattering itself, and generated images with the patches learnt from
them.

    python benchmarks/bench_features.py [--records 50000] [--repeats 5] [--out results/bench/features.json]

The goals: an epoch of the linear head within 2x of the time that reading its features takes at the stream rate of this
machine, a step of the convolutional head within 1.15x of plain training, and 10 ms of one core for the responses of an
image to 1,000 patches and their mirror images, by the processor's clock. Beside the first stands what the two products
of a step alone take, scores and gradient, from numbers that lie in the cache: no step can be faster than that.

What bounds the epoch of the linear head is the processor, not the memory: the two products alone take several times as
long as reading. To them come the copy of the batch, its conversion to float32 and the norms, each of which reads or
writes all numbers again, and between one and two milliseconds of hooks and checks for every physical batch, whatever
its size. Small physical batches stay in the cache, large ones share the fixed part. So several sizes are tried, and the
quickest of each contestant is reported.

The features are random numbers in a mapped file of the size of CIFAR-10's. Measurements are interleaved, and medians
are reported.
"""

import argparse
import math
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
import torch
from made_by import made_by
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine
from spectral_dp.features import Patches, Scattering
from spectral_dp.features.kymatio_filters import kymatio_transform
from spectral_dp.files import write_json
from spectral_dp.models import ScatterCNN, ScatterLinear
from spectral_dp.priors import generate_images

SHAPE = (243, 8, 8)
CHANNELS, RANK = (64, 8, 8), (2000,)  # of projected features
LINEAR = ("linear, private", "linear, plain")
_PHYSICAL = (64, 128, 256, 512)  # records of wide features at once, of which the quickest counts


def timed(run) -> float:
    began = perf_counter()
    run()
    return perf_counter() - began


def reading(features):
    """Yields the seconds that reading the features of a record takes, by adding up the words of all of them."""
    words = features.flatten()[: features.numel() // 4 * 4].view(torch.int64)
    while True:
        yield timed(words.sum) / len(features)


def private_epochs(model, features, labels, batch_size, physical):
    """Yields the seconds of each epoch, or of what is left of it after its first step, per record."""
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        data_loader=DataLoader(TensorDataset(features, labels), batch_size=batch_size),
        noise_multiplier=2.0,
        max_grad_norm=0.1,
        max_physical_batch_size=physical,
        rehearsal=False,
    )
    while True:
        records, began = 0, perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.float()), y).backward()
            optimizer.step()
            records += len(y)
        yield (perf_counter() - began) / records


def plain_epochs(model, features, labels, physical):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    while True:
        records, began = 0, perf_counter()
        for index in torch.randperm(len(labels)).split(physical):
            index = index.sort().values
            x, y = features.index_select(0, index).float(), labels[index]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            records += len(y)
        yield (perf_counter() - began) / records


def products():
    """Yields the seconds that the scores and the gradient of a linear head take for a record."""
    x, weight, errors = torch.randn(16, math.prod(SHAPE)), torch.randn(10, math.prod(SHAPE)), torch.randn(16, 10)
    while True:
        yield timed(lambda: [(weight @ x.T, errors.T @ x) for _ in range(50)]) / 50 / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "features.bin"
        mapped = np.memmap(path, np.float16, mode="w+", shape=(args.records, *SHAPE))
        for start in range(0, args.records, 1000):
            mapped[start : start + 1000] = np.random.default_rng(start).standard_normal((1, *SHAPE))
        features, labels = torch.from_numpy(mapped), torch.randint(0, 10, (args.records,))
        contestants = {
            "reading": reading(features),
        }
        for size in _PHYSICAL:
            heads = [ScatterLinear(SHAPE, 10) for _ in range(2)]
            contestants |= {
                f"linear, private, {size}": private_epochs(heads[0], features, labels, args.records // 6, size),
                f"linear, plain, {size}": plain_epochs(heads[1], features, labels, size),
            }
        part = min(args.records, 2048)
        contestants |= {
            "CNN, private": private_epochs(ScatterCNN(SHAPE, 10), features[:part], labels[:part], part // 2, 256),
            "CNN, plain": plain_epochs(ScatterCNN(SHAPE, 10), features[:part], labels[:part], 256),
            "CNN, projected": private_epochs(
                ScatterCNN(CHANNELS, 10, large=True), torch.randn(part, *CHANNELS).half(), labels[:part], part // 2, 256
            ),
            "linear, projected": private_epochs(
                ScatterLinear(RANK, 10), torch.randn(args.records, *RANK).half(), labels, args.records // 6, 2048
            ),
            "products": products(),
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(args.repeats + 1):
            for name, epochs in contestants.items():
                times[name].append(next(epochs))
    seconds = {name: median(values[1:]) for name, values in times.items()}
    at_once = {who: min(_PHYSICAL, key=lambda n, who=who: seconds[f"{who}, {n}"]) for who in LINEAR}
    seconds |= {who: seconds[f"{who}, {size}"] for who, size in at_once.items()}
    bound = seconds["reading"]
    rate = features[0].numel() * 2 / bound
    linear, cnn = seconds["linear, private"], seconds["CNN, private"] / seconds["CNN, plain"]
    rows.append(("stream rate", f"{rate / 1e9:.1f} GB/s", ""))
    rows.append(("epoch of the linear head, bound by memory", f"{bound * args.records:.2f} s", ""))
    words = f"epoch of the linear head, private, {at_once[LINEAR[0]]} records at once"
    rows.append((words, f"{linear * args.records:.2f} s", f"{linear / bound:.2f}x (2x)"))
    floor = seconds["products"]
    rows.append(("the products of a step alone", f"{floor * args.records:.2f} s", f"{floor / bound:.2f}x"))
    ratio = linear / seconds["linear, plain"]
    words = f"the same beside plain PyTorch, {at_once[LINEAR[1]]} records at once"
    rows.append((words, f"{seconds['linear, plain'] * args.records:.2f} s", f"{ratio:.2f}x"))
    rows.append(("a record of the CNN head, private", f"{1e6 * seconds['CNN, private']:.0f} us", f"{cnn:.2f}x (1.15x)"))
    projected = seconds["linear, projected"], seconds["CNN, projected"]
    gain = f"{linear / projected[0]:.1f}x as fast"
    rows.append((f"epoch of the linear head on {RANK[0]} coordinates", f"{projected[0] * args.records:.2f} s", gain))
    gain = f"{seconds['CNN, private'] / projected[1]:.1f}x as fast"
    rows.append((f"a record of the CNN head on {CHANNELS[0]} channels", f"{1e6 * projected[1]:.0f} us", gain))
    images = torch.rand(16, 3, 32, 32)
    ours, theirs = Scattering((0.0,) * 3, (1.0,) * 3).module((3, 32, 32)), kymatio_transform(2, 8, 2, (32, 32))
    with torch.no_grad():
        pairs = [(timed(lambda: ours(images)), timed(lambda: theirs(images))) for _ in range(args.repeats + 1)][1:]
    own, other = (1e3 / len(images) * median(values) for values in zip(*pairs, strict=True))
    rows.append(("scattering of an image", f"{own:.1f} ms", f"{other / own:.1f}x as fast as kymatio"))
    began = process_time()
    patches = Patches().module((3, 32, 32))
    learnt = process_time() - began
    began = process_time()
    drawn = generate_images("dead-leaves", 1024, (3, 32, 32))
    per_second = len(drawn) / (process_time() - began)
    costs = []
    for _ in range(args.repeats + 1):
        began = process_time()
        patches(drawn[:16])
        costs.append(1e3 * (process_time() - began) / 16)
    response = median(costs[1:])
    rows.append(("dead leaves of 32 x 32 pixels", f"{per_second:.0f} / s", ""))
    rows.append(("a dictionary of 1,000 patches", f"{learnt:.1f} s", ""))
    rows.append(("responses of an image to them", f"{response:.1f} ms", f"{response / 10:.2f}x (10 ms)"))
    table = Table(
        "what", "measured", "ratio (goal)", title=f"{args.records:,} records, {torch.get_num_threads()} threads"
    )
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if args.out is not None:
        found = {"records": args.records, "stream_rate": rate, "bound": bound * args.records, "seconds": seconds}
        found |= {"records_at_once": at_once}
        write_json(args.out, found | {"scattering_ms": [own, other], "patches_ms": response, "made_by": made_by()})


if __name__ == "__main__":
    main()
