"""The picture of an audit: the scores of steps with and without a canary, and the trade-off between the two errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import norm

from spectral_dp.audit.report import Report
from spectral_dp.files import save_figure
from spectral_dp.relations import Relation


def draw_audit(report: Report, path: str | os.PathLike[str]) -> None:
    """Draws the canary scores of single steps that an audit reports; the file appears whole or not at all."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sigma, scores = report.claim["noise_multiplier"], report.scores
    # Under replace-one the opposite record takes the place of a canary, so the scores lie either side of zero.
    outside_mean = -0.5 / sigma if report.claim["relation"] == Relation.REPLACE_ONE else 0.0
    _histogram(left, scores, outside_mean, 1 / sigma)
    _trade_off(right, scores, 1 / sigma)
    found = "no violation found" if report.ok else "the claim does NOT hold"
    figure.suptitle(f"{report.target}: claimed noise multiplier {sigma:.4g}; {found}")
    save_figure(figure, path)


def _histogram(axes: Any, scores: Mapping[str, Any], outside_mean: float, mu: float) -> None:
    inside, outside = (np.clip(scores[name], -8, 8 + mu) for name in ("inside", "outside"))
    bins = np.linspace(min(inside.min(), outside.min()), max(inside.max(), outside.max()), 60)
    grid = np.linspace(bins[0], bins[-1], 300)
    for values, label, colour in ((outside, "canary out", "C0"), (inside, "canary in", "C1")):
        axes.hist(values, bins=bins, density=True, alpha=0.45, color=colour, label=label)
    axes.plot(grid, norm.pdf(grid, outside_mean), color="C0", label="claimed")
    axes.plot(grid, norm.pdf(grid, outside_mean + mu), color="C1", label="claimed")
    axes.set(xlabel="score / claimed deviation", ylabel="density", title="Canary scores of one step")
    axes.legend()


def _trade_off(axes: Any, scores: Mapping[str, Any], mu: float) -> None:
    inside, outside = np.sort(scores["inside"]), np.sort(scores["outside"])
    thresholds = np.quantile(np.concatenate([inside, outside]), np.linspace(0, 1, 400))
    false_positive = 1 - np.searchsorted(outside, thresholds) / len(outside)
    false_negative = np.searchsorted(inside, thresholds) / len(inside)
    alpha = np.linspace(0, 1, 400)
    axes.plot(alpha, norm.cdf(norm.isf(alpha) - mu), color="black", label=f"claimed: at least this (mu {mu:.3g})")
    axes.plot(false_positive, false_negative, color="C1", label="measured, best threshold")
    axes.plot([0, 1], [1, 0], color="grey", linestyle=":", label="perfect privacy")
    axes.set(xlabel="false positive rate", ylabel="false negative rate", title="Errors of whoever looks for a canary")
    axes.legend()
