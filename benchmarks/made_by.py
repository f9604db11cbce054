"""Which versions, on which machine, by which command: what a result must carry to be believed later."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from spectral_dp.experiments.statement import provenance


def made_by(threads: int = 0) -> dict[str, Any]:
    """Facts about this very run; ``threads`` as given to torch, 0 for its own choice."""
    return provenance() | {
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "opacus": _version("opacus"),
        "cpu": _cpu(),
        "threads": threads or torch.get_num_threads(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def as_text(facts: dict[str, Any]) -> str:
    """One line of Markdown."""
    others = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "command" and value is not None)
    return f"`{facts['command']}`: {others}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()
