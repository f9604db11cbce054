"""Noise and effective signal-to-noise ratio as functions of the batch size, for the same number of sample passes.

With N records, E epochs and expected batch size B there are T = E N / B steps, and the accountant asks for a noise
multiplier σ(B). In units of the clipping bound C and of the learning rate:

    noise of one step, on each coordinate of the mean gradient     σ / B
    noise that a run adds up in each weight                        σ sqrt(T) / B
    what T equal gradients of norm 1 add up                        T
    effective signal-to-noise ratio                                sqrt(T) B / σ

For small B the noise multiplier hardly falls with B, and the ratio grows like sqrt(B). For large B the multiplier
itself grows like sqrt(B), and the ratio tends to a limit that neither B nor E changes: the budget is then used as well
as it can be, and larger batches only leave fewer steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spectral_dp.accounting import Accountant, calibrate_noise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SMALLEST = 64


@dataclass(frozen=True)
class BatchSize:
    """What one batch size means for a run.

    Attributes:
        batch_size: The expected batch size B.
        steps: The number of steps T.
        noise_multiplier: σ.
        noise_per_step: σ / B.
        noise_of_run: σ sqrt(T) / B.
        signal_to_noise: sqrt(T) B / σ.
    """

    batch_size: int
    steps: int
    noise_multiplier: float

    @property
    def noise_per_step(self) -> float:
        """Noise on a coordinate of the mean gradient, in units of C."""
        return self.noise_multiplier / self.batch_size

    @property
    def noise_of_run(self) -> float:
        """Noise that the whole run adds up in a weight, in units of C times the learning rate."""
        return self.noise_per_step * math.sqrt(self.steps)

    @property
    def signal_to_noise(self) -> float:
        """What equal gradients add up, over the noise."""
        return math.sqrt(self.steps) / self.noise_per_step

    def to_dict(self) -> dict[str, float]:
        """Returns plain values."""
        names = ("batch_size", "steps", "noise_multiplier", "noise_per_step", "noise_of_run", "signal_to_noise")
        return {name: getattr(self, name) for name in names}


def batch_size_table(
    samples: int, epochs: int, epsilon: float, delta: float, accountant: Accountant = "pld"
) -> list[BatchSize]:
    """Returns a line for every power of two from 64 (or fewer) to a quarter of the records."""
    largest = 2 ** ((samples // 4).bit_length() - 1)
    sizes = [2**k for k in range(largest.bit_length()) if 2**k >= min(_SMALLEST, largest)]
    lines = []
    for size in sizes:
        steps = epochs * math.ceil(samples / size)
        sigma = calibrate_noise(epsilon, delta, size / samples, steps, accountant=accountant)
        lines.append(BatchSize(size, steps, sigma))
    return lines


def choose(table: Sequence[BatchSize], *, share: float = 0.9, least_steps: int = 200) -> BatchSize:
    """Returns the smallest batch size that reaches a share of the best ratio, if it leaves enough steps.

    Args:
        table: The lines to choose from, by batch size.
        share: The share of the best signal-to-noise ratio that is enough.
        least_steps: The number of steps that a run needs; if no line has so many, it is not asked for.
    """
    enough = [line for line in table if line.steps >= least_steps] or list(table)
    best = max(line.signal_to_noise for line in enough)
    return next(line for line in enough if line.signal_to_noise >= share * best)


def batch_size_figure(table: Sequence[BatchSize], chosen: BatchSize) -> Figure:
    """Draws noise per step, noise of the run, and signal-to-noise ratio against the batch size."""
    from matplotlib.figure import Figure  # late: it takes a second

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = {
        "noise_per_step": "noise per step (C)",
        "noise_of_run": "noise of the run (C x learning rate)",
        "signal_to_noise": "effective signal-to-noise ratio",
    }
    for axes, (name, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        axes.plot([line.batch_size for line in table], [getattr(line, name) for line in table], marker="o")
        axes.plot(chosen.batch_size, getattr(chosen, name), marker="o", markersize=11, fillstyle="none")
        axes.set(xscale="log", yscale="log", xlabel="batch size", title=title)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    return figure
