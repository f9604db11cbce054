"""The committed results as evidence: what was run, which settings won, and what held of the paper's guidelines.

Only groups of results that differ in one setting alone say something of this setting. Results at the scale smoke, a few
hundred digits, are left out: they show that a recipe runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["held", "did not hold", "mixed", "not tested"]

#: Settings that do not tell two results apart.
_IGNORED = ("seed", "device", "threads", "max_physical_batch_size", "evaluate_every", "noise_multiplier")


@dataclass(frozen=True)
class Cell:
    """One committed result: settings, and mean test accuracy in percent over its runs."""

    source: str
    origin: str
    row: str
    settings: Mapping[str, Any]
    accuracy: float
    runs: int

    @property
    def is_private(self) -> bool:
        """Whether it is that of a private method."""
        return self.settings.get("method") != "nonprivate"

    @property
    def ratio(self) -> float:
        """The largest fraction of coefficients that a layer drops."""
        own = [self.settings.get(name) or 0.0 for name in ("conv_ratio", "linear_ratio", "feature_ratio")]
        return max([*own, *(self.settings.get("layer_ratios") or {}).values()])


def read_evidence(root: Path) -> list[Cell]:
    """Returns the results below a directory, each once; recipes may share runs. None if there is no such directory."""
    cells: dict[frozenset[str], Cell] = {}
    for path in sorted(root.glob("*/results.json")):
        report = json.loads(path.read_text())
        if report["scale"] == "smoke":
            continue
        for panel in report["panels"]:
            for cell in panel["cells"]:
                if cell["runs"] and cell["mean_percent"] is not None:
                    settings = panel["settings"] | cell["settings"]
                    facts = (path.parent.name, panel["origin"], cell["row"], settings, cell["mean_percent"])
                    cells.setdefault(frozenset(cell["runs"]), Cell(*facts, len(cell["runs"])))
    return list(cells.values())


def alike_but_for(cells: Iterable[Cell], name: str) -> list[list[Cell]]:
    """Returns groups of private results that differ in one setting alone, best first."""

    def key(cell: Cell) -> str:
        kept = {k: v for k, v in cell.settings.items() if k != name and k not in _IGNORED}
        return json.dumps(kept, sort_keys=True)

    private = sorted((cell for cell in cells if cell.is_private and name in cell.settings), key=key)
    groups = [sorted(group, key=lambda cell: -cell.accuracy) for _, group in groupby(private, key)]
    return [group for group in groups if len({repr(cell.settings[name]) for cell in group}) > 1]


@dataclass(frozen=True)
class Guideline:
    """A guideline of the paper, what became of it in our runs, and how many they are."""

    text: str
    verdict: Verdict
    because: str


def check_guidelines(cells: list[Cell]) -> list[Guideline]:
    """Checks each guideline of the paper (sections V-A and V-E) against the committed results."""
    return [
        _check_ratio(cells),
        _by_setting(cells, "block_size", "blocks of 8 (10 in the last layer)", lambda best: best == 8),
        _by_setting(cells, "max_grad_norm", "begin with C = 0.1", lambda best: best == 0.1),
        _by_setting(cells, "batch_size", "large batches, beginning with B = 2048", lambda best: best >= 2048),
        _by_setting(cells, "learning_rate", "learning rate 0.01 to 0.025", lambda best: 0.01 <= best <= 0.025),
    ]


def _by_setting(cells: list[Cell], name: str, text: str, follows: Callable[[Any], bool]) -> Guideline:
    groups = alike_but_for(cells, name)
    if not groups:
        used = sorted({cell.settings[name] for cell in cells if cell.is_private and name in cell.settings})
        shown = ", ".join(f"{value:g}" for value in used) or "none"
        return Guideline(text, "not tested", f"no two committed results differ in {name} alone (used: {shown})")
    held = sum(bool(follows(group[0].settings[name])) for group in groups)
    best = ", ".join(f"{group[0].settings[name]:g} ({group[0].accuracy:.1f} %)" for group in groups)
    verdict: Verdict = "held" if held == len(groups) else "mixed" if held else "did not hold"
    return Guideline(text, verdict, f"in {held} of {len(groups)} groups that differ in it alone; best were {best}")


def _check_ratio(cells: list[Cell]) -> Guideline:
    """Compares filters with DP-SGD of the same source, origin, data and network: the same row of the same table."""
    text = "keep at least half of the coefficients"
    gains = []
    for cell in cells:
        if cell.settings.get("method") == "spectral" and cell.ratio:
            gains += [(cell, cell.accuracy - other.accuracy) for other in cells if _is_baseline(other, cell)]
    if not gains:
        return Guideline(text, "not tested", "no committed result has a filter beside DP-SGD")
    shown = ", ".join(
        f"{cell.settings['model']} ({cell.origin} settings, ratio {cell.ratio:g}) {gain:+.2f}" for cell, gain in gains
    )
    best, gain = max(gains, key=lambda pair: pair[1])
    verdict: Verdict = "not tested" if gain <= 0 else "held" if best.ratio <= 0.5 else "did not hold"
    return Guideline(text, verdict, f"gain over DP-SGD in points: {shown}")


def _is_baseline(other: Cell, cell: Cell) -> bool:
    same = ("dataset", "model", "epsilon", "batch_size", "epochs", "features")
    alike = all(other.settings.get(name) == cell.settings.get(name) for name in same)
    return (
        alike and other.settings.get("method") == "dpsgd" and (other.source, other.origin) == (cell.source, cell.origin)
    )
