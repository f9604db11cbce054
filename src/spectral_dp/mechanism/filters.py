"""Filters: they decide which spectral coordinates are kept, and with which gains.

A filter gives each coordinate a *pre-gain* ``a >= 0``, which is applied before clipping, and a *post-gain* ``b >= 0``,
which is applied after the noise. (The mechanism is ``z = a * (T g)``, clip, sum, noise, ``T^t (b * s)``.) Coordinates
with a pre-gain or a post-gain of zero are *dropped*: they are not released, and no noise is drawn for them.

Formal guarantee:

- What is bounded: gains never change the privacy loss. Clipping comes after ``a``, so one record moves the sum by at
  most the clipping bound, whatever ``a`` is. The multiplication by ``b`` is post-processing.
- For which neighbours: the same as for the clipped sum, under either relation.
- Under which assumption: *the gains of a step are fixed before that step reads any data*. They may depend on public
  facts, on the step number and on what earlier steps released, but never on the raw batch. Every filter in this module
  satisfies this; a filter of your own must satisfy it, too.

The ratio ``ρ`` counts **real degrees of freedom**. At least a fraction ``ρ`` of them is dropped, in whole frequencies,
but never the lowest frequency. So by Proposition 1 the noise variance of each output sample is at most
``(1 - ρ) σ² S²``, unless only the lowest frequency is left. :attr:`Gains.effective_ratio` is the fraction that was
really dropped.

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
from spectral_dp.mechanism.transforms import Fourier, Transform, as_tuple

Order = Literal["filter_then_clip", "clip_then_filter"]
Region = Literal["lowest", "box"]
Schedule = Literal["linear", "cosine"]


class Filter(ABC):
    """A rule that gives the gains of each step. Subclasses must fix the gains before the step reads any data."""

    @abstractmethod
    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Returns the gains of training step ``step``, for coordinates of shape ``shape`` under ``transform``."""

    def observe(self, released: Tensor, noise_std: float) -> None:  # noqa: B027 - most filters learn nothing
        """Is called after each release, so that a filter can learn from it. Most filters do nothing here.

        Args:
            released: The noisy coefficients ``(..., M)`` that were just released. Copy what is to be kept of them:
                they become the gradient in place.
            noise_std: The standard deviation of the noise in each of them.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what the filter has learnt, for the checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got keys {sorted(state)}: saved by another filter?")


@dataclass(frozen=True)
class IdentityFilter(Filter):
    """A filter that keeps every coordinate unchanged."""

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Returns gains that are all one."""
        return _low_pass_of(transform, shape, 0.0, "lowest", "filter_then_clip")


@dataclass(frozen=True)
class LowPassFilter(Filter):
    """A filter that drops the highest frequencies: at least a fraction ``ratio`` of the real degrees of freedom.

    Attributes:
        ratio: Fraction ``ρ`` of the real degrees of freedom to drop, in [0, 1).
        region: Shape of the kept region in two dimensions. ``"lowest"`` keeps the frequencies of smallest radius.
            ``"box"`` keeps the box ``i < K1, j < K2`` of Corollary 1, with the same share of both axes. In one
            dimension there is no difference.
        order: Order of filter and clip. With ``"filter_then_clip"``, dropped coordinates do not use up the clipping
            bound: the noise and the privacy are the same, and less is clipped. ``"clip_then_filter"`` is the order of
            Algorithm 1.
    """

    ratio: float
    region: Region = "lowest"
    order: Order = "filter_then_clip"

    def __post_init__(self) -> None:
        _check_ratio("ratio", self.ratio)
        check_choice("region", self.region, Region)
        check_choice("order", self.order, Order)

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Returns gains of one on the kept frequencies. With ``"clip_then_filter"`` all pre-gains are one."""
        return _low_pass_of(transform, shape, float(self.ratio), self.region, self.order)


@dataclass(frozen=True)
class PaperBandFilter(Filter):
    """The band of the paper: the first ``K = (1 - ρ) N`` coefficients of the *full* spectrum and their mirror images.

    Algorithms 1 to 3 set the last fraction ``ρ`` of the coefficients to zero (of rows and columns in 2-D). On a real
    signal the last coefficients mirror the first ones, so the frequencies ``{0..K-1}`` and ``{-(K-1)..0}`` are kept.
    These are up to twice as many degrees of freedom as ``ρ`` suggests. Use this filter to reproduce the tables of the
    paper, and :class:`LowPassFilter` to drop a fraction ``ρ``.

    Attributes:
        ratio: Fraction ``ρ`` of the full complex spectrum that the paper sets to zero, in [0, 1).
        order: See :class:`LowPassFilter`.
    """

    ratio: float
    order: Order = "filter_then_clip"

    def __post_init__(self) -> None:
        _check_ratio("ratio", self.ratio)
        check_choice("order", self.order, Order)

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Returns gains of one on the band. Only Fourier coefficients have mirror images, so other transforms raise."""
        if not isinstance(transform, Fourier):
            raise ValueError(
                f"PaperBandFilter is defined on the Fourier spectrum, not on {transform.name!r}: use LowPassFilter"
            )
        shape = as_tuple(shape)
        size = torch.tensor(shape)
        bandwidth = torch.tensor([max(1, math.floor((1 - self.ratio) * n + 1e-9)) for n in shape])
        f = transform.frequencies(shape)
        kept = ((f % size) < bandwidth).all(-1) | ((-f % size) < bandwidth).all(-1)
        return _hard(kept, self.order)


@dataclass(frozen=True, eq=False)
class ShapedFilter(Filter):
    """A filter with given gains: by default the post-gains are ``1 / pre``, so that the signal keeps its scale.

    A large pre-gain spends more of the clipping bound on a coordinate, and less noise remains in it. Compute ``pre``
    from public data or from past releases. If ``pre`` is one everywhere and ``post`` is below one, this is a Wiener
    filter.

    Attributes:
        pre: Gains before clipping, with the shape of the coordinates. Zero drops a coordinate.
        post: Gains after the noise. The default is ``1 / pre`` where ``pre`` is positive.
    """

    pre: Tensor
    post: Tensor | None = None

    def __post_init__(self) -> None:
        self._gains  # noqa: B018 - computed now, so that bad gains fail where they are given

    @classmethod
    def from_second_moment(cls, second_moment: Tensor) -> ShapedFilter:
        """Returns the filter with the nearly optimal pre-gains ``S^(-1/4)``.

        The gains are scaled to a geometric mean of one, so that the clipping bound keeps its meaning.

        Args:
            second_moment: Second moments ``S`` of per-sample gradients, one for each coordinate, all positive. They
                must come from public data or from past releases.
        """
        s = second_moment.double()
        if not bool(torch.isfinite(s).all()) or bool((s <= 0).any()):
            raise ValueError(f"second moments must be finite and positive, got {value_range(s)}")
        log_gain = s.log() / -4
        return cls((log_gain - log_gain.mean()).exp())

    @cached_property
    def _gains(self) -> Gains:
        # Copies, because results that were computed from gains are cached: nobody may change the gains afterwards.
        pre = self.pre.detach().to("cpu", torch.float64, copy=True)
        if self.post is not None:
            return Gains(pre, self.post.detach().to("cpu", torch.float64, copy=True))
        return Gains(pre, torch.where(pre > 0, 1 / pre.where(pre > 0, torch.ones(())), torch.zeros(())))

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Returns the given gains, and raises ``ValueError`` if their shape is another."""
        if self._gains.pre.shape != as_tuple(shape):
            raise ValueError(
                f"gains of shape {tuple(self.pre.shape)} do not fit coordinates of shape {as_tuple(shape)}"
            )
        return self._gains


@dataclass(frozen=True)
class AnnealedFilter(Filter):
    """A low-pass whose ratio changes from ``start`` to ``end`` by a schedule that is fixed before training.

    Attributes:
        start: Ratio at step 0, in [0, 1).
        end: Ratio from step ``steps`` on, in [0, 1).
        steps: Number of steps over which the ratio changes.
        schedule: Shape of the change: ``"linear"`` or ``"cosine"``.
        region: See :class:`LowPassFilter`.
        order: See :class:`LowPassFilter`.
    """

    start: float
    end: float
    steps: int
    schedule: Schedule = "linear"
    region: Region = "lowest"
    order: Order = "filter_then_clip"

    def __post_init__(self) -> None:
        _check_ratio("start", self.start)
        _check_ratio("end", self.end)
        check_choice("schedule", self.schedule, Schedule)
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def ratio(self, step: int) -> float:
        """Returns the ratio at ``step``. It is constant from ``steps`` on."""
        progress = min(max(step / self.steps, 0.0), 1.0)
        if self.schedule == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress

    def gains(self, transform: Transform, shape: int | Sequence[int], step: int = 0) -> Gains:
        """Returns the gains of the low-pass with the ratio of this step."""
        return LowPassFilter(self.ratio(step), self.region, self.order).gains(transform, shape)


class AdaptiveFilter(Filter):
    """A low-pass with Wiener gains that are learnt from earlier releases.

    The noise of a released coefficient has a known variance ``v``. So the mean square of the coefficient gives an
    estimate of the signal power ``p`` at its frequency. Later releases multiply the coefficient by ``p / (p + v)``,
    which reduces coefficients that are mostly noise. Everything is computed from released values, so it costs no
    privacy. What was learnt is saved in checkpoints.

    Each parameter block needs an instance of its own. Averages are taken over the leading dimensions of the released
    tensor.

    Args:
        ratio: Fraction of the degrees of freedom that is always dropped, as in :class:`LowPassFilter`.
        decay: Weight of the past in the running average of the signal power, in [0, 1).
        floor: Smallest post-gain, in (0, 1]. It is positive, so that no frequency is lost for ever.
        region: See :class:`LowPassFilter`.
        order: See :class:`LowPassFilter`.
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
        """Updates the estimated signal power of each kept coordinate."""
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
        """Returns the gains of the low-pass, times the Wiener gains once there was a release to learn from."""
        base = self._base.gains(transform, shape)
        if self._power is None or self._noise_variance == 0:
            return base
        if base.index.numel() != self._power.numel():
            raise ValueError(
                f"this filter has learnt {self._power.numel()} coordinates and is asked for {base.index.numel()} of "
                f"shape {as_tuple(shape)}: give every parameter block an AdaptiveFilter of its own"
            )
        power = (self._power / self._weight).clamp(min=0)
        wiener = (power / (power + self._noise_variance)).clamp(min=self._floor)
        return Gains(base.pre, base.post * base.expand(wiener))

    def state_dict(self) -> dict[str, Any]:
        """Returns the running average as plain numbers."""
        power = None if self._power is None else self._power.tolist()
        return {"power": power, "weight": self._weight, "noise_variance": self._noise_variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        if set(state) != {"power", "weight", "noise_variance"}:
            raise ValueError(f"not the state of an AdaptiveFilter: keys {sorted(state)}")
        power = state["power"]
        self._power = None if power is None else torch.tensor(power, dtype=torch.float64)
        self._weight, self._noise_variance = float(state["weight"]), float(state["noise_variance"])

    def __repr__(self) -> str:
        return f"AdaptiveFilter({self._base!r}, decay={self._decay}, floor={self._floor})"


def _hard(kept: Tensor, order: Order) -> Gains:
    return Gains(torch.ones((), dtype=torch.bool).expand(kept.shape) if order == "clip_then_filter" else kept, kept)


def _low_pass_of(transform: Transform, shape: int | Sequence[int], ratio: float, region: Region, order: Order) -> Gains:
    transform.check_shape(as_tuple(shape))
    return _low_pass(transform.frequency_twin, as_tuple(shape), ratio, region, order)


@lru_cache(maxsize=128)  # because it is called at every step of training
def _low_pass(transform: Transform, shape: tuple[int, ...], ratio: float, region: Region, order: Order) -> Gains:
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
    # The squared radius in cycles per sample, scaled to whole numbers so that equal radii compare equal.
    others = torch.tensor([math.prod(shape) // n for n in shape])
    radius = (f * others).square().sum(-1)
    return radius < _first_dropped(radius, 1 - ratio)


def _first_dropped(frequency: Tensor, share: float) -> int:
    """Returns the lowest dropped frequency: at most ``share`` of the coordinates are kept, or the lowest frequency."""
    ordered = frequency if frequency.ndim == 1 else frequency.flatten().sort().values  # one axis is ordered already
    fits = math.floor(share * len(ordered) + 1e-9)
    return int(ordered[-1]) + 1 if fits >= len(ordered) else max(int(ordered[fits]), int(ordered[0]) + 1)


def _check_ratio(name: str, ratio: float) -> None:
    if not 0 <= ratio < 1:  # also refuses NaN
        raise ValueError(f"{name} is the fraction of coordinates to drop and must be in [0, 1), got {ratio}")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Raises ``ValueError``, with the choices, unless a value is one of those of a ``Literal``."""
    if value not in get_args(choices):
        raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(map(repr, get_args(choices)))}")
