"""Cost of training heads on cached features: an epoch of the linear head against the memory, a step of the CNN against
plain PyTorch, both also on projected features, the scattering itself, and generated images with the patches learnt from
them.

    python benchmarks/bench_features.py [--records 50000] [--repeats 5] [--out results/bench]

The goals: an epoch of the linear head within 2x of the time that reading its features takes at the stream rate of this
machine, a step of the convolutional head within 1.15x of plain training, and 10 ms of one core for the responses of an
image to 1,000 patches and their mirror images, by the processor's clock. Beside the first stands what the two products
of a step alone take, scores and gradient, from numbers that lie in the cache: no step can be faster than that.

The features are random numbers in a mapped file of the size of CIFAR-10's. Measurements are interleaved, and medians
are reported.
"""

import argparse
import math
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import measuring
import numpy as np
import torch
from made_by import as_text, made_by
from page import Sheet, markdown
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine
from spectral_dp.features import Patches, Scattering
from spectral_dp.features.kymatio_filters import kymatio_transform
from spectral_dp.files import write_json, write_text
from spectral_dp.models import ScatterCNN, ScatterLinear
from spectral_dp.priors import generate_images

SHAPE = (243, 8, 8)
CHANNELS, RANK = (64, 8, 8), (2000,)  # of projected features
LINEAR = ("linear, private", "linear, plain")
_PHYSICAL = (64, 128, 256, 512)  # records of wide features at once, of which the quickest counts
_CONVOLVED = 256  # records at once of the convolutional head
_BOUND = (
    "What bounds the epoch of the linear head is the processor, not the memory: the two products alone take "
    "several times as long as reading. To them come the copy of the batch, its conversion to float32 and the "
    "norms, each of which reads or writes all numbers again, and between one and two milliseconds of hooks "
    "and checks for every physical batch, whatever its size. Small physical batches stay in the cache, large "
    "ones share the fixed part. So several sizes are tried, and the quickest of each contestant is reported."
)


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


def head_times(records: int, repeats: int) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the median seconds of a record for each contestant, and how many records at once are quickest."""
    with tempfile.TemporaryDirectory() as directory:
        mapped = np.memmap(Path(directory) / "features.bin", np.float16, mode="w+", shape=(records, *SHAPE))
        for start in range(0, records, 1000):
            mapped[start : start + 1000] = np.random.default_rng(start).standard_normal((1, *SHAPE))
        features, labels = torch.from_numpy(mapped), torch.randint(0, 10, (records,))
        contestants = {"reading": reading(features), "products": products()}
        for size in _PHYSICAL:
            heads = [ScatterLinear(SHAPE, 10) for _ in range(2)]
            contestants[f"linear, private, {size}"] = private_epochs(heads[0], features, labels, records // 6, size)
            contestants[f"linear, plain, {size}"] = plain_epochs(heads[1], features, labels, size)
        contestants["linear, projected"] = private_epochs(
            ScatterLinear(RANK, 10), torch.randn(records, *RANK).half(), labels, records // 6, 2048
        )
        part = min(records, 2048)
        some, channels = features[:part], torch.randn(part, *CHANNELS).half()
        for name, maps in {"CNN": some, "CNN, projected": channels}.items():
            heads = [ScatterCNN(tuple(maps.shape[1:]), 10, large=True) for _ in range(2)]
            contestants[f"{name}, private"] = private_epochs(heads[0], maps, labels[:part], part // 2, _CONVOLVED)
            contestants[f"{name}, plain"] = plain_epochs(heads[1], maps, labels[:part], _CONVOLVED)
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(repeats + 1):
            for name, epochs in contestants.items():
                times[name].append(next(epochs))
    seconds = {name: median(values[1:]) for name, values in times.items()}
    at_once = {who: min(_PHYSICAL, key=lambda n, who=who: seconds[f"{who}, {n}"]) for who in LINEAR}
    return seconds | {who: seconds[f"{who}, {size}"] for who, size in at_once.items()}, at_once


def extractor_times(repeats: int) -> dict[str, float]:
    """Returns milliseconds of an image for each front end, images drawn in a second, and seconds of a dictionary.

    All of one core: threads that wait for work would count as processor time.
    """
    torch.set_num_threads(1)
    images = torch.rand(16, 3, 32, 32)
    ours, theirs = Scattering((0.0,) * 3, (1.0,) * 3).module((3, 32, 32)), kymatio_transform(2, 8, 2, (32, 32))
    with torch.no_grad():
        pairs = [(timed(lambda: ours(images)), timed(lambda: theirs(images))) for _ in range(repeats + 1)][1:]
    own, other = (1e3 / len(images) * median(values) for values in zip(*pairs, strict=True))
    began = process_time()
    patches = Patches().module((3, 32, 32))
    learnt = process_time() - began
    began = process_time()
    drawn = generate_images("dead-leaves", 1024, (3, 32, 32))
    per_second = len(drawn) / (process_time() - began)
    costs = []
    for _ in range(repeats + 1):
        began = process_time()
        patches(drawn[:16])
        costs.append(1e3 * (process_time() - began) / 16)
    return {
        "scattering_ms": own,
        "kymatio_ms": other,
        "patches_ms": median(costs[1:]),
        "dictionary_s": learnt,
        "images_a_second": per_second,
    }


def sheet(found: dict[str, Any]) -> Sheet:
    """All that was measured, with ratios and the goals that there are for them."""
    seconds, at_once, times, records = (found[key] for key in ("seconds", "records_at_once", "front_ends", "records"))
    bound, linear, plain = (seconds[name] for name in ("reading", *LINEAR))
    own, projected = seconds["CNN, private"], seconds["CNN, projected, private"]
    scattering, patches = times["scattering_ms"], times["patches_ms"]

    def epoch(of_a_record: float) -> str:
        return f"{of_a_record * records:.2f} s"

    linear_rows = [
        ("stream rate", f"{2 * math.prod(SHAPE) / bound / 1e9:.1f} GB/s", "", ""),
        ("epoch of the linear head: reading its features", epoch(bound), "", ""),
        ("its two products alone", epoch(seconds["products"]), f"{seconds['products'] / bound:.1f} of reading", ""),
        (f"private, {at_once[LINEAR[0]]} records at once", epoch(linear), f"{linear / bound:.1f} of reading", "≤ 2"),
        (f"plain, {at_once[LINEAR[1]]} records at once", epoch(plain), f"private {linear / plain:.2f} of it", ""),
        (f"private, on {RANK[0]} coordinates", epoch(seconds["linear, projected"]), "", ""),
    ]
    convolutional_rows = [
        (
            "a record of the convolutional head, private",
            us(own),
            f"{own / seconds['CNN, plain']:.2f} of plain",
            "≤ 1.15",
        ),
        (
            f"the same on {CHANNELS[0]} channels",
            us(projected),
            f"{projected / seconds['CNN, projected, plain']:.2f} of plain",
            "",
        ),
    ]
    front_end_rows = [
        (
            "scattering of an image, one core",
            f"{scattering:.1f} ms",
            f"{scattering / times['kymatio_ms']:.2f} of kymatio",
            "",
        ),
        ("dead leaves of 32 x 32 pixels", f"{times['images_a_second']:.0f} / s", "", ""),
        ("a dictionary of 1,000 patches", f"{times['dictionary_s']:.1f} s", "", ""),
        ("responses of an image to them, one core", f"{patches:.1f} ms", "", "≤ 10 ms"),
    ]
    title = f"{records:,} records of 243 x 8 x 8"
    return Sheet(title, ("what", "measured", "ratio", "goal"), [linear_rows, convolutional_rows, front_end_rows])


def us(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="a directory for features.json and features.md")
    args = parser.parse_args()
    seconds, at_once = head_times(args.records, args.repeats)
    found = {"made_by": made_by(), "records": args.records, "repeats": args.repeats, "seconds": seconds}
    found |= {"records_at_once": at_once, "front_ends": extractor_times(args.repeats)}
    measured = sheet(found)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "features.json", found)
        source = "Measured by " + as_text(found["made_by"]) + f". Medians of {args.repeats} interleaved rounds."
        write_text(
            args.out / "features.md", markdown("Heads on cached features", [source, _BOUND, measured.as_markdown()])
        )
    measuring.wide_console().print(measured.for_terminal())


if __name__ == "__main__":
    main()
