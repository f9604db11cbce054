"""What a private step costs besides gradients: loading, noise, checks, the ledger; and how much noise is drawn.

    python benchmarks/bench_overheads.py [--steps 30] [--out results/bench]

Through the real engine and its Poisson loader, on random records in memory: Model3 with and without a filter, and
LeNet-5 with the loader of Opacus beside ours. Medians over steps, with quartiles; shares are of the same step.

Goals at batch 256 on Model3: a fixed cost (all of the optimizer's step but norms, clipped sums and the wrapped
optimizer) under 5 % of the step, noise for the kept coordinates only, and loading not the bottleneck: here, under 5 %.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import measuring
import torch
from contestants import half, nothing
from goals import verdict
from made_by import as_text, made_by
from page import Sheet, markdown
from rich.console import Console
from rich.progress import Progress
from spread import Spread, paired_ratio
from stopwatch import PrivateTraining, Times
from torch.utils.data import DataLoader, TensorDataset
from workloads import Workload

from spectral_dp.files import write_json, write_text

MOST = 0.05
#: Parts of a step as they are listed, by what the stopwatch calls them; those with a goal first.
PARTS = {
    "loader": "loader",
    "fixed": "fixed cost: noise, checks, ledger",
    "noise": "of that, drawing noise",
    "squared_norms": "norms",
    "clipped_sums": "clipped sums",
    "forward and backward": "forward and backward",
    "step": "wrapped optimizer",
    "get_epsilon": "get_epsilon, not part of the step",
}
RATIOS = {"0": nothing, "0.5": half}


def records(work: Workload, size: int) -> TensorDataset:
    """As many as asked for, from a batch of the workload's shape."""
    x, _ = Workload(work.model, 1).batch()
    return TensorDataset(torch.randn(size, *x.shape[1:]), torch.randint(10, (size,)))


def shares(times: list[Times], judged: Collection[str]) -> list[dict[str, Any]]:
    """Each part of a step: how long, and which share of the same step; those judged with what that means."""
    found = []
    for part, label in PARTS.items():
        seconds = [step[part] for step in times]
        time, share = Spread.of(seconds), paired_ratio(seconds, [step["total"] for step in times])
        assert time is not None
        assert share is not None
        said = verdict(share.median, MOST) if part in judged else ""
        found.append({"part": label, "seconds": asdict(time), "share": asdict(share), "verdict": said})
    return found


def on_model3(ratio: str, args: argparse.Namespace) -> dict[str, Any]:
    work = Workload("model3", args.batch)
    model = work.build()
    training = PrivateTraining(model, records(work, args.records), args.batch, RATIOS[ratio](model))
    parts = shares(training.run(args.steps), ("loader", "fixed"))
    drawn = {"parameters": training.parameters, "kept": training.kept, "drawn": sorted(set(training.drawn))}
    said = "reached" if drawn["drawn"] == [training.kept] else "missed"
    return {"filter_ratio": ratio, "parts": parts, "numbers": drawn | {"verdict": said}}


def on_lenet5(args: argparse.Namespace) -> dict[str, Any]:
    """The loader within training, and by itself beside that of Opacus on the same records."""
    work = Workload("lenet5", args.batch)
    model, dataset = work.build(), records(work, args.lenet_records)
    parts = shares(PrivateTraining(model, dataset, args.batch, half(model)).run(args.steps), ("loader",))
    loaders = {name: itertools.chain.from_iterable(itertools.repeat(v)) for name, v in both(dataset, args).items()}
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(args.steps):
        for name, batches in loaders.items():
            began = perf_counter()
            next(batches)
            seconds[name].append(perf_counter() - began)
    spreads = {name: Spread.of(values[1:]) for name, values in seconds.items()}  # the first sets things up
    return {"parts": parts, "seconds_of_a_batch": {name: asdict(spread) for name, spread in spreads.items() if spread}}


def both(dataset: TensorDataset, args: argparse.Namespace) -> dict[str, Any]:
    from opacus.data_loader import DPDataLoader

    from spectral_dp.training.sampling import PoissonLoader

    loader = DataLoader(dataset, batch_size=args.batch)
    return {"ours": PoissonLoader.from_data_loader(loader), "opacus": DPDataLoader.from_data_loader(loader)}


def sheets(found: dict[str, Any]) -> list[Sheet]:
    made, headings = [], ("part", "ms", "share of the step", f"≤ {MOST:.0%}")
    steps = {f"Model3, filter ratio {run['filter_ratio']}": run["parts"] for run in found["model3"]}
    for title, parts in (steps | {"LeNet-5, filter ratio 0.5": found["lenet5"]["parts"]}).items():
        rows = [
            [p["part"], Spread(**p["seconds"]).text(1e3), Spread(**p["share"]).text(100, 1) + " %", p["verdict"]]
            for p in parts
        ]
        made.append(Sheet(f"{title}, batch {found['batch']}", headings, [rows]))
    numbers = [(run["filter_ratio"], run["numbers"]) for run in found["model3"]]
    rows = [[r, f"{n['parameters']}", f"{n['kept']}", " ".join(map(str, n["drawn"])), n["verdict"]] for r, n in numbers]
    made.append(Sheet("Noise on Model3", ("ratio", "parameters", "kept", "drawn a step", "drawn = kept"), [rows]))
    rows = [[name, Spread(**spread).text(1e3)] for name, spread in found["lenet5"]["seconds_of_a_batch"].items()]
    made.append(Sheet(f"Poisson batches of {found['lenet_records']} images", ("loader", "ms a batch"), [rows]))
    return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--records", type=int, default=50_000, help="of Model3")
    parser.add_argument("--lenet-records", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; its own choice by default")
    parser.add_argument("--out", type=Path, help="a directory for overheads.json and overheads.md")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    found: dict[str, Any] = {"made_by": made_by(args.threads), "batch": args.batch, "steps": args.steps}
    found |= {"records": args.records, "lenet_records": args.lenet_records, "model3": []}
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("overheads", total=len(RATIOS) + 1)
        for ratio in RATIOS:
            found["model3"].append(on_model3(ratio, args))
            bar.advance(task)
        found["lenet5"] = on_lenet5(args)
        bar.advance(task)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(args.out / "overheads.json", found)
        tables = [sheet.as_markdown() for sheet in sheets(found)]
        source = "Measured by " + as_text(found["made_by"]) + "."
        write_text(args.out / "overheads.md", markdown("Overheads of a private step", [source, *tables]))
    for sheet in sheets(found):
        measuring.wide_console().print(sheet.for_terminal())


if __name__ == "__main__":
    main()
