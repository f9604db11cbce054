"""Training in one and in two processes: time per step, and bytes that each process gives to the all-reduce.

    python benchmarks/bench_distributed.py [--steps 60] [--rounds 3] [--without-opacus] [--out results/bench]

Weak scaling: the batch grows with the number of processes, so that each of them has the same work. Every process has
one thread. Beside ours, with and without a filter: plain DistributedDataParallel, and Opacus' DPDDP if it is installed.
Medians over the steps of all rounds, with quartiles, of the slowest process; the contestants take turns. Bytes are
those of the tensors that are added: a ring of R processes sends each of them 2 (R - 1) / R times.

Then what a step consists of is measured by itself (``step_parts.py``), for the cost model of ``scaling_model.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from made_by import as_text, made_by
from page import Sheet, markdown
from rich.console import Console
from rich.progress import Progress
from spread import Spread
from step_parts import parts_alone, parts_together
from torch import distributed as dist
from torch import nn
from torch.multiprocessing import spawn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine, SpectralConfig
from spectral_dp.files import write_json, write_text

SIDE, WIDTH, CLASSES, RATIO = 32, 256, 10, 0.75
DDP, DPDDP, OURS, FILTERED = "plain DDP", "Opacus DPDDP", "spectral-dp", f"spectral-dp, ratio {RATIO}"
CONTESTANTS = (DDP, DPDDP, OURS, FILTERED)

#: Bytes may exceed the kept fraction of DDP's by this much, and efficiency must be this much of DDP's own.
MOST_BYTES, LEAST_EFFICIENCY = 1.05, 0.85


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
    if name == DDP:
        if ranks > 1:
            model = nn.parallel.DistributedDataParallel(model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "data_loader": loader}
    if name == DPDDP:
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
    torch.manual_seed(0)  # all ranks list the same records
    data = TensorDataset(
        torch.randn(16 * batch_size * ranks, 1, SIDE, SIDE), torch.zeros(16 * batch_size * ranks).long()
    )
    # Ours and Opacus take the batch of all processes, plain loaders that of each.
    whole = batch_size if name == DDP else batch_size * ranks
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
    if name == DDP and ranks > 1:  # within torch's own code, which adds every gradient once
        return times[warm:], float(sum(p.nbytes for p in model.parameters()))
    return times[warm:], wire.bytes / steps


def serve(rank: int, ranks: int, store: str, name: str, steps: int, batch_size: int, answers: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    answers.put(measured(name, steps, batch_size) if name else parts_together())
    dist.barrier()
    dist.destroy_process_group()


def in_processes(ranks: int, name: str, steps: int = 0, batch_size: int = 0) -> list[Any]:
    """Returns what each of some new processes measured of a contestant; without a name, of the parts of a step."""
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (ranks, str(Path(directory, "store")), name, steps, batch_size, answers)
        spawn(serve, arguments, nprocs=ranks)  # raises what any of them raises
    return [answers.get() for _ in range(ranks)]


def race(names: Sequence[str], steps: int, rounds: int, batch_size: int) -> list[dict[str, Any]]:
    """Measures the contestants in turn. Processes wait for each other, so the slowest counts."""
    turns = [(name, ranks) for name in names for ranks in (1, 2)]
    times: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
    sent: dict[tuple[str, int], float] = {}
    with Progress(console=Console(stderr=True)) as bar:
        for name, ranks in bar.track(turns * rounds):
            found = in_processes(ranks, name, steps, batch_size)
            times[name, ranks] += [max(each) for each in zip(*(own for own, _ in found), strict=True)]
            sent[name, ranks] = found[0][1]
    spreads = {turn: Spread.of(each) for turn, each in times.items()}
    return [
        {"name": name, "processes": ranks, "seconds": list(astuple(spread)), "bytes": sent[name, ranks]}
        for (name, ranks), spread in spreads.items()
        if spread is not None
    ]


def efficiencies(results: list[dict[str, Any]]) -> dict[str, float]:
    """The time of one process over that of two, which do twice the work, of each contestant."""
    seconds = {(r["name"], r["processes"]): r["seconds"][1] for r in results}
    return {name: seconds[name, 1] / seconds[name, 2] for name, ranks in seconds if ranks == 2}


def sheet(results: list[dict[str, Any]]) -> Sheet:
    headings = ("", "processes", "ms a step [quartiles]", "efficiency", "KB added a step", "of DDP's")
    efficiency = efficiencies(results)
    of_ddp = next((r["bytes"] for r in results if r["name"] == DDP and r["bytes"]), None)
    rows = []
    for r in results:
        is_alone = r["processes"] == 1
        share = f"{100 * r['bytes'] / of_ddp:.1f} %" if of_ddp and not is_alone else ""
        cells = ["", ""] if is_alone else [f"{efficiency[r['name']]:.2f}", f"{r['bytes'] / 1e3:.1f}"]
        rows.append([r["name"], str(r["processes"]), Spread(*r["seconds"]).text(1e3, 1), *cells, share])
    return Sheet("Weak scaling", headings, [rows])


def goals(results: list[dict[str, Any]]) -> Sheet:
    """Bytes against the kept fraction of what DDP adds, and efficiency against that of DDP."""
    sent = {r["name"]: r["bytes"] for r in results if r["processes"] == 2}
    efficiency, rows = efficiencies(results), []
    for name, kept in ((OURS, 1.0), (FILTERED, kept_fraction(RATIO))):
        share, most = sent[name] / sent[DDP], MOST_BYTES * kept
        rows.append([f"bytes of DDP's, {name}", f"at most {most:.3f}", f"{share:.3f}", _verdict(share <= most)])
        relative = efficiency[name] / efficiency[DDP]
        wanted = f"at least {LEAST_EFFICIENCY}"
        rows.append([f"efficiency of DDP's, {name}", wanted, f"{relative:.2f}", _verdict(relative >= LEAST_EFFICIENCY)])
    return Sheet("Goals", ("", "goal", "measured", ""), [rows])


def _verdict(reached: bool) -> str:
    return "reached" if reached else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="samples of each process")
    parser.add_argument("--without-opacus", action="store_true")
    parser.add_argument("--out", type=Path, help="a directory for the results, as JSON and Markdown")
    args = parser.parse_args()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)  # now: minutes later there would be nothing to write to
    facts = made_by(1) | {"load": round(os.getloadavg()[0], 1)}  # of other programs, before this one begins
    torch.set_num_threads(1)
    parts = parts_alone(network()) | in_processes(2, "")[0]
    names = [name for name in CONTESTANTS if not (args.without_opacus and name == DPDDP)]
    results = race(names, args.steps, args.rounds, args.batch_size)
    kept = f"The filter keeps {100 * kept_fraction(RATIO):.1f} % of the parameters."
    console = Console() if Console().is_terminal else Console(width=120)
    for each in (sheet(results), goals(results)):
        console.print(each.for_terminal())
    console.print(kept, as_text(facts))
    if args.out:
        found = {
            "made_by": facts,
            "batch_size": args.batch_size,
            "parameters": _parameters(),
            "kept": kept_fraction(RATIO),
        }
        write_json(args.out / "distributed.json", found | {"results": results, "parts": parts})
        paragraphs = [
            sheet(results).as_markdown(),
            kept,
            goals(results).as_markdown(),
            f"Measured by {as_text(facts)}.",
        ]
        write_text(args.out / "distributed.md", markdown("Training in two processes", paragraphs))


def _parameters() -> int:
    return sum(p.numel() for p in network().parameters())


if __name__ == "__main__":
    main()
