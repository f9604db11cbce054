"""What to run, and why: batch size, epochs, noise, learning rate, clipping bound, blocks and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spectral_dp.experiments.planning.batch_sizes import BatchSize, choose
from spectral_dp.experiments.planning.evidence import Cell

#: The clipping bound to begin with, which is the paper's. For plain SGD only its product with the learning rate counts,
#: as long as nearly all gradients are longer than it.
CLIPPING_BOUND = 0.1


@dataclass(frozen=True)
class Advice:
    """One recommended setting, and the reason."""

    setting: str
    value: Any
    because: str


def recommend(
    table: Sequence[BatchSize], epochs: int, model: str, recommended: dict[str, Any], cells: Sequence[Cell]
) -> list[Advice]:
    """Returns what to run.

    Args:
        table: Noise by batch size.
        epochs: The compute budget in sample passes.
        model: The name of the network.
        recommended: What is registered for this network with Spectral-DP.
        cells: The committed results.
    """
    chosen = choose(table)
    best = max(line.signal_to_noise for line in table)
    share = chosen.signal_to_noise / best
    return [
        Advice(
            "batch_size",
            chosen.batch_size,
            f"the smallest with at least 200 steps and 90 % of what these can reach: {share:.0%} of the best "
            f"signal-to-noise ratio, in {chosen.steps} steps",
        ),
        Advice("epochs", epochs, "all of the compute that was given: more steps for the same ratio are smaller steps"),
        Advice("noise_multiplier", chosen.noise_multiplier, "what the budget takes for these steps"),
        Advice("max_grad_norm", CLIPPING_BOUND, "the paper's; with SGD its product with the learning rate counts"),
        _learning_rate(model, cells),
        Advice("schedule", "cosine", "that of all tuned results; the noise of the last steps then counts little"),
        *_spectral(model, recommended, cells),
    ]


def _learning_rate(model: str, cells: Sequence[Cell]) -> Advice:
    """Learning rate times C of tuned SGD results: those of this network, or of all."""
    tuned = [
        cell
        for cell in cells
        if cell.is_private and cell.origin == "tuned" and cell.settings.get("optimizer") == "sgd"
        if "learning_rate" in cell.settings and cell.settings.get("method") in ("spectral", "dpsgd")
    ]
    own = [cell for cell in tuned if cell.settings.get("model") == model]
    used = own or [cell for cell in tuned if cell.settings.get("features") is None]
    if not used:
        return Advice("learning_rate", None, "no committed result to go by: search for it (spectral-dp tune)")
    product = statistics.median(c.settings["learning_rate"] * c.settings["max_grad_norm"] for c in used)
    whose = "this network" if own else "other networks"
    return Advice(
        "learning_rate",
        round(product / CLIPPING_BOUND, 6),
        f"learning rate times C was {product:g} in the middle of {len(used)} tuned results of {whose}, which hardly "
        "vary in batch size and number of steps; that is few, so search around it (spectral-dp tune)",
    )


def _spectral(model: str, recommended: dict[str, Any], cells: Sequence[Cell]) -> list[Advice]:
    """What is registered for the network, with the gain over DP-SGD that was measured for it."""
    pairs = [
        (cell, other)
        for cell in cells
        for other in cells
        if cell.origin == other.origin == "tuned" and cell.source == other.source
        if cell.settings.get("method") == "spectral" and other.settings.get("method") == "dpsgd"
        if cell.settings.get("model") == other.settings.get("model") == model
    ]
    if pairs:
        cell, other = pairs[0]
        why = (
            f"tuned: {cell.accuracy:.2f} % with filters against {other.accuracy:.2f} % with DP-SGD "
            f"({cell.runs} seeds, {cell.source})"
        )
    else:
        why = "registered for this network; no committed result compares it with DP-SGD"
    ratios = {name: value for name, value in recommended.items() if name.endswith(("ratio", "ratios"))}
    others = {name: value for name, value in recommended.items() if name not in ratios}
    settings = {"block_size": 0} | others | (ratios or {"conv_ratio": 0, "linear_ratio": 0})
    return [Advice(name, value, why) for name, value in settings.items()]
