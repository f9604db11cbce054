"""Filters: which spectral coordinates survive, and with what gain.

A filter gives each coordinate a *pre-gain* ``a >= 0``, applied before clipping, and a *post-gain* ``b >= 0``, applied
after the noise (the mechanism is ``z = a * (T g)``, clip, sum, noise, ``T^t (b * s)``). Coordinates whose
pre- or post-gain is zero are *dropped*: nothing of them is released and no noise is drawn for them.

Formal guarantee. Gains never change the privacy loss: clipping comes after ``a``, so one record moves the sum by at
most the clipping bound whatever ``a`` is, and ``b`` is post-processing. This needs one assumption, which every filter
here keeps: *the gains of a step are fixed before that step reads any data*. They may depend on public facts, on the
step number, and on what earlier steps released; never on the raw batch.

The ratio ``ρ`` counts **real degrees of freedom**: at least a fraction ``ρ`` of them is dropped (always whole
frequencies, and never the lowest), so by Proposition 1 the noise left in the signal is at most
``(1 - ρ) σ² S²`` per sample. :attr:`Gains.effective_ratio` is the fraction really dropped.

>>> from spectral_dp.mechanism.transforms import get_transform
>>> gains = LowPassFilter(0.5).gains(get_transform("fourier"), 8)
>>> gains.kept.int().tolist()  # DC and the pair of frequency 1: a fourth coordinate would split frequency 2
[1, 1, 1, 0, 0, 0, 0, 0]
>>> gains.effective_ratio, gains.noise_variance
(0.625, 0.375)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from spectral_dp.mechanism.gains import Gains, value_range
from spectral_dp.mechanism.transforms import Fourier, Transform

Order = Literal["filter_then_clip", "clip_then_filter"]
Region = Literal["lowest", "box"]
Schedule = Literal["linear", "cosine"]


class Filter(ABC):
    """A rule for the gains of each step. Subclasses fix them before the step sees data."""

    @abstractmethod
    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Returns the gains for coordinates of ``shape`` under ``transform`` at training step ``step``."""

    def observe(self, released: Tensor, noise_std: float) -> None:  # noqa: B027 - most filters learn nothing
        """Is shown the noisy coefficients ``(..., M)`` of the step just released and their noise's deviation."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what the filter has learnt; belongs in the checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got keys {sorted(state)}: saved by another filter?")


@dataclass(frozen=True)
class IdentityFilter(Filter):
    """Keeps everything as it is."""

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """All ones."""
        return _low_pass(transform, _shape(shape), 0.0, "lowest", "filter_then_clip")


@dataclass(frozen=True)
class LowPassFilter(Filter):
    """Drops the highest frequencies: at least a fraction ``ratio`` of the real degrees of freedom.

    Attributes:
        ratio: ``ρ`` in [0, 1).
        region: In two dimensions, ``"lowest"`` keeps the frequencies of smallest radius, ``"box"`` the box
            ``i < K1, j < K2`` of Corollary 1, with the same share of either axis. In one dimension they agree.
        order: ``"filter_then_clip"`` does not let dropped coordinates use up the clipping bound: same noise, same
            privacy, less clipping. ``"clip_then_filter"`` is the order of Algorithm 1.
    """

    ratio: float
    region: Region = "lowest"
    order: Order = "filter_then_clip"

    def __post_init__(self) -> None:
        _check_ratio("ratio", self.ratio)
        _check_choice("region", self.region, Region)
        _check_choice("order", self.order, Order)

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Ones on the kept frequencies; before the clip as well unless the order says otherwise."""
        return _low_pass(transform, _shape(shape), float(self.ratio), self.region, self.order)


@dataclass(frozen=True)
class PaperBandFilter(Filter):
    """The paper's band: the first ``K = (1 - ρ) N`` coefficients of the *full* spectrum, with their mirror images.

    Algorithms 1 to 3 zero the last ``ρ`` of the coefficients (of rows and columns in 2-D). On a real signal the last
    coefficients mirror the first, so what is really kept is ``{0..K-1}`` and ``{-(K-1)..0}``: up to twice as many
    degrees of freedom as ``ρ`` suggests. It lays out the paper's tables; :class:`LowPassFilter` does what ``ρ`` says.
    """

    ratio: float
    order: Order = "filter_then_clip"

    def __post_init__(self) -> None:
        _check_ratio("ratio", self.ratio)
        _check_choice("order", self.order, Order)

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Ones on the band; Fourier only, since only there coefficients have mirror images."""
        if not isinstance(transform, Fourier):
            raise ValueError(
                f"PaperBandFilter is defined on the Fourier spectrum, not on {transform.name!r}: use LowPassFilter"
            )
        shape = _shape(shape)
        size = torch.tensor(shape)
        bandwidth = torch.tensor([max(1, math.floor((1 - self.ratio) * n + 1e-9)) for n in shape])
        f = transform.frequencies(shape)
        kept = ((f % size) < bandwidth).all(-1) | ((-f % size) < bandwidth).all(-1)
        return _hard(kept, self.order)


@dataclass(frozen=True, eq=False)
class ShapedFilter(Filter):
    """Given gains: ``pre`` before the clip, its inverse after the noise, so that the signal keeps its scale.

    A large pre-gain spends more of the clipping bound on a coordinate and leaves it less noise. Take ``pre`` from
    public data or from past releases. With ``pre`` all ones and ``post`` below one it is a Wiener filter.

    Attributes:
        pre: Gains before clipping, of the coordinates' shape; zero drops a coordinate.
        post: Gains after the noise; ``1 / pre`` where not given.
    """

    pre: Tensor
    post: Tensor | None = None

    def __post_init__(self) -> None:
        self._gains  # noqa: B018 - computed now, so that bad gains fail where they are given

    @classmethod
    def from_second_moment(cls, second_moment: Tensor) -> ShapedFilter:
        """Near-optimal shaping ``S^(-1/4)`` for coordinates with per-sample second moments ``S``.

        Scaled to geometric mean one, so that the clipping bound keeps its meaning.
        """
        s = second_moment.double()
        if not bool(torch.isfinite(s).all()) or bool((s <= 0).any()):
            raise ValueError(f"second moments must be finite and positive, got {value_range(s)}")
        log_gain = s.log() / -4
        return cls((log_gain - log_gain.mean()).exp())

    @cached_property
    def _gains(self) -> Gains:
        # Copies: what is made of gains is kept for as long as they are the same, so nobody may change them.
        pre = self.pre.detach().to("cpu", torch.float64, copy=True)
        if self.post is not None:
            return Gains(pre, self.post.detach().to("cpu", torch.float64, copy=True))
        return Gains(pre, torch.where(pre > 0, 1 / pre.where(pre > 0, torch.ones(())), torch.zeros(())))

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """The given gains, if they fit."""
        if self._gains.pre.shape != _shape(shape):
            raise ValueError(f"gains of shape {tuple(self.pre.shape)} do not fit coordinates of shape {_shape(shape)}")
        return self._gains


@dataclass(frozen=True)
class AnnealedFilter(Filter):
    """A low-pass whose ratio moves from ``start`` to ``end`` over ``steps`` steps by a schedule fixed beforehand."""

    start: float
    end: float
    steps: int
    schedule: Schedule = "linear"
    region: Region = "lowest"
    order: Order = "filter_then_clip"

    def __post_init__(self) -> None:
        _check_ratio("start", self.start)
        _check_ratio("end", self.end)
        _check_choice("schedule", self.schedule, Schedule)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def ratio(self, step: int) -> float:
        """The ratio at ``step``; constant from ``steps`` on."""
        progress = min(max(step / self.steps, 0.0), 1.0)
        if self.schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Those of the low-pass of this step."""
        return LowPassFilter(self.ratio(step), self.region, self.order).gains(transform, shape)


class AdaptiveFilter(Filter):
    """A low-pass with Wiener gains learnt from what was released.

    The noise of a released coefficient has a known variance ``v``, so its mean square tells the signal power
    ``p`` of its frequency. Later releases weigh it by ``p / (p + v)``: a coefficient that carries mostly noise is
    turned down. Everything is computed from released values, so it costs no privacy; it is state, so it is saved.

    One instance serves one parameter block. Averages run over the leading dimensions of the released tensor.

    Args:
        ratio: Fraction of the degrees of freedom dropped outright, as in :class:`LowPassFilter`.
        decay: Memory of the running average of the signal power.
        floor: Smallest post-gain, above zero so that no frequency is lost for good.
        region: As in :class:`LowPassFilter`.
        order: As in :class:`LowPassFilter`.
    """

    def __init__(
        self,
        ratio: float = 0.0,
        *,
        decay: float = 0.95,
        floor: float = 0.05,
        region: Region = "lowest",
        order: Order = "filter_then_clip",
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay}")
        if not 0 < floor <= 1:
            raise ValueError(f"floor must be in (0, 1], got {floor}")
        self._base = LowPassFilter(ratio, region, order)
        self._decay = decay
        self._floor = floor
        self._power: Tensor | None = None  # running mean of (square - noise variance), (M,), not yet bias-corrected
        self._weight = 0.0
        self._noise_variance = 0.0

    def observe(self, released: Tensor, noise_std: float) -> None:
        """Updates the signal power of each kept frequency."""
        square = released.detach().double().square().flatten(0, -2).mean(0) if released.ndim > 1 else released**2
        if self._power is not None and self._power.shape != square.shape:
            raise ValueError(
                f"this filter has seen {self._power.numel()} kept coordinates and now {square.numel()}: "
                "give every parameter block an AdaptiveFilter of its own"
            )
        excess = square.double().cpu() - noise_std**2
        before = torch.zeros_like(excess) if self._power is None else self._power
        self._power = self._decay * before + (1 - self._decay) * excess
        self._weight = self._decay * self._weight + (1 - self._decay)
        self._noise_variance = noise_std**2

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """The low-pass, weighted by what has been learnt; the low-pass alone before anything was released."""
        base = self._base.gains(transform, shape)
        if self._power is None or self._noise_variance == 0:
            return base
        if base.index.numel() != self._power.numel():
            raise ValueError(
                f"this filter has learnt {self._power.numel()} coordinates and is asked for {base.index.numel()} of "
                f"shape {_shape(shape)}: give every parameter block an AdaptiveFilter of its own"
            )
        power = (self._power / self._weight).clamp(min=0)
        wiener = (power / (power + self._noise_variance)).clamp(min=self._floor)
        return Gains(base.pre, base.post * base.expand(wiener))

    def state_dict(self) -> dict[str, Any]:
        """The running average; plain numbers."""
        power = None if self._power is None else self._power.tolist()
        return {"power": power, "weight": self._weight, "noise_variance": self._noise_variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        if set(state) != {"power", "weight", "noise_variance"}:
            raise ValueError(f"not the state of an AdaptiveFilter: keys {sorted(state)}")
        power = state["power"]
        self._power = None if power is None else torch.tensor(power, dtype=torch.float64)
        self._weight, self._noise_variance = float(state["weight"]), float(state["noise_variance"])

    def __repr__(self) -> str:
        return f"AdaptiveFilter({self._base!r}, decay={self._decay}, floor={self._floor})"


def _hard(kept: Tensor, order: Order) -> Gains:
    return Gains(torch.ones((), dtype=torch.bool).expand(kept.shape) if order == "clip_then_filter" else kept, kept)


@lru_cache(maxsize=128)  # asked for at every step of training
def _low_pass(transform: Transform, shape: tuple[int, ...], ratio: float, region: Region, order: Order) -> Gains:
    transform.check_shape(shape)
    everything = torch.ones((), dtype=torch.bool).expand(shape)
    return _hard(everything if ratio == 0 else _low_pass_mask(transform, shape, ratio, region), order)


def _low_pass_mask(transform: Transform, shape: tuple[int, ...], ratio: float, region: Region) -> Tensor:
    f = transform.frequencies(shape).abs()
    if len(shape) == 1:
        f = f.squeeze(-1)
        return f < _first_dropped(f, 1 - ratio)
    if region == "box":
        bandwidth, share = [0, 0], math.sqrt(1 - ratio)
        used = share
        for axis in sorted((0, 1), key=shape.__getitem__):  # a short axis may have to keep more than its share
            line = transform.frequencies(shape[axis]).squeeze(-1)
            bandwidth[axis] = _first_dropped(line, min(share, (1 - ratio) / used))
            used = float((line < bandwidth[axis]).double().mean())
        return (f < torch.tensor(bandwidth)).all(-1)
    # Squared radius in cycles per sample, in whole numbers so that equal radii compare equal.
    others = torch.tensor([math.prod(shape) // n for n in shape])
    radius = (f * others).square().sum(-1)
    return radius < _first_dropped(radius, 1 - ratio)


def _first_dropped(frequency: Tensor, share: float) -> int:
    """The frequency from which on coordinates are dropped, so that at most ``share`` of them (but one) are kept."""
    ordered = frequency if frequency.ndim == 1 else frequency.flatten().sort().values  # one axis is ordered already
    fits = math.floor(share * len(ordered) + 1e-9)
    return int(ordered[-1]) + 1 if fits >= len(ordered) else max(int(ordered[fits]), int(ordered[0]) + 1)


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)


def _check_ratio(name: str, ratio: float) -> None:
    if not 0 <= ratio < 1:  # also refuses NaN
        raise ValueError(f"{name} is the fraction of coordinates to drop and must be in [0, 1), got {ratio}")


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(map(repr, get_args(choices)))}")
