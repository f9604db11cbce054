"""Training in one and in two processes: time per step, and bytes that each process gives to the all-reduce.

    python benchmarks/bench_distributed.py [--steps 30] [--batch-size 256] [--out results/bench]

Weak scaling: the batch grows with the number of processes, so that each of them has the same work. Every process has
one thread. Beside ours, with and without a filter: plain DistributedDataParallel, and Opacus' DPDDP if it is installed.
Medians over steps, with quartiles, of the slowest process. Bytes are those of the tensors that are added: a ring of R
processes sends each of them 2 (R - 1) / R times.

Goals: bytes at most 5 % above the kept fraction of what DDP adds, and an efficiency (time of one process over time of
two) of at least 0.85 of DDP's own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import warnings
from dataclasses import astuple
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from made_by import as_text, made_by
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from spread import Spread
from torch import distributed as dist
from torch import nn
from torch.multiprocessing import spawn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine, SpectralConfig
from spectral_dp.files import write_json

SIDE, WIDTH, CLASSES, RATIO = 32, 256, 10, 0.75
CONTESTANTS = ("plain DDP", "Opacus DPDDP", "spectral-dp", f"spectral-dp, ratio {RATIO}")


def network() -> nn.Module:
    """A network of two dense layers on images, nearly all of whose parameters the filter acts on."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def kept_fraction(ratio: float) -> float:
    """The fraction of the parameters of the network whose coordinates are released."""
    filtered, sizes = SIDE * SIDE * WIDTH, sum(p.numel() for p in network().parameters())
    return 1 - ratio * filtered / sizes


class Wire:
    """Counts the bytes of tensors that are given to all-reduce."""

    def __init__(self) -> None:
        self.bytes = 0
        self._plain = dist.all_reduce

    def __enter__(self) -> Wire:
        def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            self.bytes += tensor.nbytes
            return self._plain(tensor, *args, **options)

        dist.all_reduce = counted
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._plain


def prepared(name: str, loader: DataLoader[Any], ranks: int) -> tuple[nn.Module, Any, Any]:
    """Returns model, optimizer and loader of a contestant."""
    model: nn.Module = network()
    if name == "plain DDP":
        if ranks > 1:
            model = nn.parallel.DistributedDataParallel(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": loader}
    if name == "Opacus DPDDP":
        import opacus

        if ranks > 1:
            model = opacus.distributed.DifferentiallyPrivateDistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return opacus.PrivacyEngine().make_private(module=model, optimizer=optimizer, **options)
    spectral = SpectralConfig(linear_ratio=RATIO, input_layouts={"1": (1, SIDE, SIDE)}) if "ratio" in name else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return PrivacyEngine().make_private(
        module=model, optimizer=optimizer, spectral=spectral, rehearsal=False, **options
    )


def measured(name: str, steps: int, batch_size: int) -> tuple[list[float], float]:
    """Returns the seconds of each step on this rank, and the bytes of one."""
    ranks = dist.get_world_size()
    data = TensorDataset(
        torch.randn(16 * batch_size * ranks, 1, SIDE, SIDE), torch.zeros(16 * batch_size * ranks).long()
    )
    # Ours takes the batch of all processes, the others that of each.
    whole = batch_size * ranks if name.startswith("spectral") or name == "Opacus DPDDP" else batch_size
    with Wire() as wire:
        model, optimizer, loader = prepared(name, DataLoader(data, batch_size=whole), ranks)
        times: list[float] = []
        warm = 3
        while len(times) < steps + warm:
            began = perf_counter()
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                times.append(perf_counter() - began)
                if len(times) == warm:
                    wire.bytes = 0
                if len(times) == steps + warm:
                    break
                began = perf_counter()
    if name == "plain DDP" and ranks > 1:  # within torch's own code, which adds every gradient once
        return times[warm:], float(sum(p.nbytes for p in model.parameters()))
    return times[warm:], wire.bytes / steps


def serve(rank: int, ranks: int, store: str, name: str, steps: int, batch_size: int, answers: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    answers.put(measured(name, steps, batch_size))
    dist.barrier()
    dist.destroy_process_group()


def race(name: str, ranks: int, steps: int, batch_size: int) -> dict[str, Any]:
    """Measures a contestant in new processes, which wait for each other, so the slowest counts."""
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (ranks, str(Path(directory, "store")), name, steps, batch_size, answers)
        spawn(serve, arguments, nprocs=ranks)  # raises what any of them raises
    found = [answers.get() for _ in range(ranks)]
    slowest = [max(times) for times in zip(*(times for times, _ in found), strict=True)]
    spread = Spread.of(slowest)
    assert spread is not None
    return {"name": name, "processes": ranks, "seconds": list(astuple(spread)), "bytes": found[0][1]}


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table("", "processes", "ms a step (quartiles)", "efficiency", "KB added a step", "of DDP's")
    alone = {r["name"]: r["seconds"][1] for r in results if r["processes"] == 1}
    of_ddp = next((r["bytes"] for r in results if r["name"] == "plain DDP" and r["bytes"]), None)
    for r in results:
        low, middle, high = (1e3 * s for s in r["seconds"])
        efficiency = f"{alone[r['name']] / r['seconds'][1]:.2f}" if r["processes"] > 1 else ""
        share = f"{100 * r['bytes'] / of_ddp:.1f} %" if of_ddp and r["bytes"] else ""
        row = (r["name"], str(r["processes"]), f"{middle:.1f} ({low:.1f} to {high:.1f})", efficiency)
        shown.add_row(*row, f"{r['bytes'] / 1e3:.1f}", share)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256, help="samples of each process")
    parser.add_argument("--out", type=Path, help="a directory for the results, as JSON")
    args = parser.parse_args()
    facts, results = made_by(1), []
    with Progress(console=Console(stderr=True)) as bar:
        for name in bar.track(CONTESTANTS):
            for ranks in (1, 2):
                results.append(race(name, ranks, args.steps, args.batch_size))
    console = Console() if Console().is_terminal else Console(width=120)
    console.print(table(results))
    console.print(f"kept by the filter: {100 * kept_fraction(RATIO):.1f} % of the parameters")
    console.print(as_text(facts))
    if args.out:
        write_json(args.out / "distributed.json", {"made_by": facts, "results": results})


if __name__ == "__main__":
    main()
