"""Training steps of plain PyTorch, Opacus and ours: time and peak memory, as ratios within one run.

    python benchmarks/bench_training.py [--models lenet5 bert] [--batches 256] [--rounds 9] [--out results/bench]

Every contestant lives in a process of its own, so that its peak memory is its own; one of them works at a time, in an
order that cancels drift (see race.py). Ratios are medians of ratios within a round, with quartiles. Plain is ordinary
training of the dense model, also where the others train a block-circulant one; "best Opacus" is the quickest of its
modes. What Opacus cannot train as it is, attention and LSTM, it trains in forms of its own (DPMultiheadAttention,
DPLSTM). Where a part of a model is trained, plain trains the same part.

Needs a quiet machine: on a busy one, threads wait for each other. There, --threads 1 --clock cpu counts the processor's
time, which others do not lengthen as much.

With --out, what was measured replaces what was there of the same models and batches, and nothing else.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import entries as kept
import measuring
from contestants import CONTESTANTS, contestants_for
from entries import Entry
from goals import goals_sheet, judge
from measuring import Job
from page import Sheet, markdown, sources, steps_sheet
from training_figure import draw
from workloads import Workload

from spectral_dp.files import save_figure, write_json, write_text

IMAGE_BATCHES, SEQUENCE_BATCHES = (64, 256, 1024), (32,)

#: Model, block size, and batch sizes.
WORKLOADS: dict[str, tuple[str, int | None, tuple[int, ...]]] = {
    "model1": ("model1", None, IMAGE_BATCHES),
    "model1 blocks": ("model1", 8, IMAGE_BATCHES),
    "lenet5": ("lenet5", None, IMAGE_BATCHES),
    "model2": ("model2", None, IMAGE_BATCHES),
    "model3": ("model3", None, IMAGE_BATCHES),
    "transformer blocks": ("transformer", 8, IMAGE_BATCHES),
    "bert": ("bert", None, SEQUENCE_BATCHES),
    "torch encoder": ("torch encoder", None, SEQUENCE_BATCHES),
    "bert, lora": ("bert, lora", None, SEQUENCE_BATCHES),
    "bert, biases": ("bert, biases", None, SEQUENCE_BATCHES),
    "bert, head": ("bert, head", None, SEQUENCE_BATCHES),
    "lstm": ("lstm", None, SEQUENCE_BATCHES),
}


def arguments() -> argparse.Namespace:
    parser = measuring.parser(__doc__, rounds=9)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="MODEL")
    parser.add_argument("--batches", nargs="+", type=int, help="default: 64, 256 and 1024; of sequences 32")
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), metavar="NAME", help="default: all")
    return parser.parse_args()


def job(workload: str, batch: int, wanted: list[str] | None) -> Job:
    model, block_size, _ = WORKLOADS[workload]
    work = Workload(model, batch, block_size)
    names = [name for name in contestants_for(work) if not wanted or name in ("plain", *wanted)]
    return Job(workload, batch, work, names)


def sheets(entries: list[Entry]) -> list[Sheet]:
    return [goals_sheet(entries), steps_sheet(entries, "Training steps", "workload", "batch")]


def write(out: Path, new: Entry) -> None:
    """Merges an entry into what is there."""
    out.mkdir(parents=True, exist_ok=True)
    entries = in_order(kept.merge(kept.load(out / "training.json"), [new]))
    write_json(out / "training.json", kept.as_json(entries, goals=judge(entries)))
    picture = "![Time and memory over plain PyTorch](training.png)"
    tables = [sheet.as_markdown() for sheet in sheets(entries)]
    write_text(out / "training.md", markdown("Training steps", [sources(entries), picture, *tables]))
    save_figure(draw(entries), out / "training.png")


def in_order(entries: list[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (list(WORKLOADS).index(entry.name), entry.size))


def main() -> None:
    args = arguments()
    new: list[Entry] = []

    def keep(entry: Entry) -> None:
        new.append(entry)
        if args.out:
            write(args.out, entry)

    jobs = [job(m, b, args.contestants) for m in args.models for b in args.batches or WORKLOADS[m][2]]
    measuring.measure(jobs, args, keep)
    for sheet in reversed(sheets(in_order(new))):  # the goals last, where a terminal shows them
        measuring.wide_console().print(sheet.for_terminal())


if __name__ == "__main__":
    main()
