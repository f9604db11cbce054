"""Tests whether noise is what it is claimed to be: independent normals of one known deviation, fresh at every step.

*Residuals* are released coordinates minus what they would be without noise. Coordinates that a filter drops have none.
Every test is exact for independent normals, so the rate of false alarms is as stated for any number of
residuals. Deviations are judged by chi-square, the shape by Kolmogorov-Smirnov, dependence by the cosine c between two
vectors of n residuals, for which (1 + c)/2 ~ Beta((n-1)/2, (n-1)/2) whatever the scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc
from scipy.stats import binom, chi2, kstest
from torch import Tensor

from spectral_dp.audit.statistics.bounds import checked_confidence

_Array = NDArray[np.float64]

_ZERO_RATE = 2.0**-23  # how often float32 arithmetic may round a normal to exactly zero
_MOST_COMPARED = 2048  # vectors compared pairwise; of more, a random choice

_FINDINGS = {
    "scale": "the deviation is {scale:.4g} times the claimed one",
    "coordinate scale": "some coordinate has another deviation than claimed",
    "step scale": "some step has another deviation than claimed",
    "shape": "the values are not normal of the claimed deviation",
    "zeros": "there are exact zeros, where no noise was added",
    "neighbouring steps": "steps are correlated with the step before",
    "two steps": "two steps repeat, or cancel, the same noise",
    "neighbouring coordinates": "coordinates are correlated with their neighbours",
    "two coordinates": "two coordinates share noise",
    "two blocks": "two blocks share noise",
    "scale of a call": "another deviation than claimed at {where}",
    "silence": "a parameter has a call without any noise",
    "tails": "large values are rarer, or more frequent, than normal ones",
    "zeros in a call": "a call has numbers without noise",
    "calls at one distance": "calls that are some distance apart share noise",
    "two calls": "two calls repeat, or cancel, the same noise",
}


@dataclass(frozen=True)
class NoiseLaw:
    """What the tests found.

    Attributes:
        scale: Observed over claimed deviation.
        p_values: For each test, corrected for the number of tests: below ``1 - confidence`` the law is rejected.
        confidence: Probability, at least, that noise as claimed passes all tests.
        where: The most unlikely calls, where calls were tested one by one.
    """

    scale: float
    p_values: dict[str, float]
    confidence: float
    where: str = ""

    @property
    def ok(self) -> bool:
        """Whether no test rejects the claimed law."""
        return not self.reasons

    @property
    def reasons(self) -> tuple[str, ...]:
        """What speaks against the claimed law, in words."""
        return tuple(
            f"{_FINDINGS[test].format(scale=self.scale, where=self.where)} (p = {p:.2g})"
            for test, p in self.p_values.items()
            if p < 1 - self.confidence
        )

    @property
    def verdict(self) -> str:
        """``"ok"``, or the reasons against it."""
        return "; ".join(self.reasons) or "ok"


def judge_noise(residuals: Tensor | _Array, *, confidence: float, blocks: Sequence[slice] = ()) -> NoiseLaw:
    """Tests residuals ``(steps, coordinates)``, in units of the claimed deviation, for being independent N(0, 1).

    Formal guarantee:

    * Bounded: noise as claimed is rejected with probability at most ``1 - confidence``, all tests together.

    Args:
        residuals: Noise alone, over the deviation that is claimed for it; one row for each step.
        confidence: Probability with which noise as claimed must pass, at least 3/4.
        blocks: Slices of the coordinates that must not share noise, such as the layers of a model. They are compared
            from their beginnings, since a generator that is started again for each layer repeats itself there.
    """
    checked_confidence(confidence)
    z = _checked(residuals)
    steps, coordinates = z.shape
    squares = np.square(z)
    p_values: dict[str, float | None] = {
        "scale": other_scale(squares.sum(), z.size).item(),
        "coordinate scale": worst(other_scale(squares.sum(0), steps)),
        "step scale": worst(other_scale(squares.sum(1), coordinates)),
        "shape": float(kstest(z.ravel(), "norm").pvalue),
        "zeros": float(binom.sf(np.count_nonzero(z == 0) - 1, z.size, _ZERO_RATE)),
        # Neighbours in disjoint pairs: overlapping ones would be more, but their cosine has no exact law.
        "neighbouring steps": _aligned(z[0 : steps // 2 * 2 : 2], z[1::2]),
        "two steps": _two_aligned(z),
        "neighbouring coordinates": _aligned(z[:, 0 : coordinates // 2 * 2 : 2], z[:, 1::2]),
        "two coordinates": _two_aligned(z.T),
        "two blocks": _two_blocks([z[:, block] for block in blocks]),
    }
    done = {test: p for test, p in p_values.items() if p is not None}
    corrected = {test: min(1.0, p * len(done)) for test, p in done.items()}
    return NoiseLaw(float(np.sqrt(squares.mean())), corrected, confidence)


def _checked(residuals: Tensor | _Array) -> _Array:
    if isinstance(residuals, Tensor):
        residuals = residuals.detach().cpu().double().numpy()
    values = np.asarray(residuals, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"residuals must be of shape (steps, coordinates), not empty; got {tuple(values.shape)}")
    if not (finite := np.isfinite(values)).all():
        raise ValueError(f"{int((~finite).sum())} of {values.size} residuals are not finite: no law to test")
    return values


def other_scale(sum_of_squares: _Array, n: ArrayLike) -> _Array:
    """Two-sided p-value of a sum of squares of n standard normals; elementwise."""
    return 2 * np.minimum(chi2.cdf(sum_of_squares, n), chi2.sf(sum_of_squares, n))


def worst(p_values: _Array) -> float:
    """The smallest p-value, corrected for how many there are."""
    return min(1.0, float(p_values.min()) * p_values.size)


def _aligned(a: _Array, b: _Array) -> float | None:
    """P-value of the cosine between two vectors, of independent normals if they are as claimed."""
    if a.size < 2:
        return None
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(cosine_p_value(abs(float((a * b).sum())) / norms if norms else 0.0, a.size))


def _two_aligned(vectors: _Array) -> float | None:
    """P-value of the largest cosine between any two rows."""
    if min(vectors.shape) < 2:
        return None
    if len(vectors) > _MOST_COMPARED:
        vectors = vectors[np.random.default_rng(0).choice(len(vectors), _MOST_COMPARED, replace=False)]
    units = unit_rows(vectors)
    largest = np.abs(np.triu(units @ units.T, 1)).max()
    pairs = len(vectors) * (len(vectors) - 1) // 2
    return min(1.0, pairs * float(cosine_p_value(float(largest), vectors.shape[1])))


def _two_blocks(blocks: list[_Array]) -> float | None:
    """P-value of the largest cosine between the beginnings of any two blocks."""
    if not all(block.size for block in blocks):
        raise ValueError(f"a block is empty: the blocks have {[block.shape[1] for block in blocks]} coordinates")
    found = [_aligned(a[:, : b.shape[1]], b[:, : a.shape[1]]) for a, b in combinations(blocks, 2)]
    p_values = [p for p in found if p is not None]
    return worst(np.array(p_values)) if p_values else None


def unit_rows(vectors: _Array) -> _Array:
    """Returns the rows divided by their norms; rows of zeros stay."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)


def cosine_p_value(cosine: ArrayLike, n: ArrayLike) -> _Array:
    """P-value of the size of a cosine between two vectors of n > 1 independent normals; elementwise."""
    half = (np.asarray(n) - 1) / 2
    return np.asarray(betainc(half, half, np.maximum(0.0, (1 - np.asarray(cosine)) / 2)) * 2)
