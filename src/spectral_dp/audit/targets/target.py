"""What can be audited: anything that, given records, makes one release. And what is claimed of it.

A :class:`Target` is a release seen from outside, as a linear machine with a clip: records go in, one flat vector comes
out, in units of the *sum* over records (the public divisor undone), so that one record counts at most the clipping
bound. The auditor chooses the records and may take the place of the noise (``noise_control``);
everything between is the target's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spectral_dp import accounting
from spectral_dp.accounting import Ledger, Phase
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.relations import Relation

#: A record in a form that its target understands.
Record = Any


class Kind(StrEnum):
    """Classes of coordinates. Mistakes like to hide in the first three, which are special cases of a spectrum."""

    DC = "DC"
    NYQUIST = "Nyquist"
    LAST = "last"
    INTERIOR = "interior"
    BIAS = "bias"


#: How much longer than the clipping bound a record's gradient is where it is to be clipped.
LONG = 1e4

#: How long, in clipping bounds, the gradients of records are that are not to be clipped.
SHORT = (0.1, 0.5)

#: How long, in clipping bounds, the gradients of records are that a clip with a threshold of its own might let pass.
BEYOND = (1.1, 2.0, 8.0, 64.0)


@dataclass(frozen=True)
class Claim:
    """The claim that is made of a release, and what follows from it.

    Attributes:
        noise_multiplier: ``σ``: deviation of the noise over the sensitivity of ``relation``.
        max_grad_norm: ``C``: the most that one record contributes.
        expected_batch_size: The public divisor.
        sample_rate: Probability that a record takes part in a step.
        steps: Number of releases.
        delta: The ``δ`` at which epsilon is stated.
        relation: Which data sets are neighbours.
        stated_epsilon: What a privacy statement says is spent, where there is one.
        beside: Other releases of the same records that the statement covers, too.
    """

    noise_multiplier: float
    max_grad_norm: float = 1.0
    expected_batch_size: float = 64.0
    sample_rate: float = 1.0
    steps: int = 1
    delta: float = 1e-5
    relation: Relation = Relation.ADD_OR_REMOVE_ONE
    stated_epsilon: float | None = None
    beside: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "relation", Relation(self.relation))
        for name in ("noise_multiplier", "max_grad_norm", "expected_batch_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive to be audited, got {getattr(self, name)}")

    @cached_property
    def epsilon(self) -> float:
        """What all steps together spend, if the rest is true."""
        return accounting.epsilon(
            self.noise_multiplier, self.sample_rate, self.steps, self.delta, relation=self.relation
        )

    @cached_property
    def total_epsilon(self) -> float:
        """What all steps and the releases beside them spend together, if the rest is true."""
        ledger = Ledger(self.relation)
        for phase in (*self.beside, Phase(self.noise_multiplier, self.sample_rate, self.steps)):
            ledger.record(*phase)
        return ledger.epsilon(self.delta)

    @property
    def step_epsilon(self) -> float:
        """What one step spends on those who are in its batch."""
        return accounting.gaussian_epsilon(self.noise_multiplier, self.delta)

    @property
    def moves(self) -> int:
        """How many clipping bounds apart neighbours can be."""
        return 1 if self.relation is Relation.ADD_OR_REMOVE_ONE else 2

    @property
    def noise_std(self) -> float:
        """Deviation of the noise on the sum."""
        return self.noise_multiplier * self.moves * self.max_grad_norm


class Output(NamedTuple):
    """A stretch of the release: a parameter's name, its shape, and the deviation claimed for its noise.

    The deviation is that of every number, independent of the others, of the space that is released at all; None where
    gains or a crop shape the noise, so that it has no single deviation. Noise is steady if it has the same law at every
    step; a filter that anneals or learns changes it.
    """

    name: str
    shape: tuple[int, ...]
    noise_std: float | None
    is_steady: bool = True

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return torch.Size(self.shape).numel()


class Hostile(NamedTuple):
    """A record made to move the release further than it may."""

    name: str
    record: Record
    finite: bool


@dataclass(frozen=True, eq=False)
class Block:
    """Some directions of one layer in which a record's gradient can point.

    Attributes:
        layer: Name of the layer.
        name: Which block of it.
        basis: ``(k, n)``, orthonormal rows: the directions, as signals that ``make`` takes.
        labels: What each direction is.
        kinds: Its class.
        support: Indices of the numbers of the release that such a gradient belongs to.
        make: Turns a signal ``(n,)`` into a record with that gradient.
    """

    layer: str
    name: str
    basis: Tensor
    labels: tuple[str, ...]
    kinds: tuple[Kind, ...]
    support: Tensor
    make: Callable[[Tensor], Record]

    def record(self, direction: Tensor, length: float) -> Record:
        """A record whose gradient has this direction, ``(k,)`` in coordinates of the basis, and length."""
        unit = direction.double() / direction.double().norm()
        return self.make(length * (unit @ self.basis))


@dataclass(frozen=True)
class SampledRun:
    """A training run with the target's own sampling: the rate it really has, and its releases, one a step."""

    sample_rate: float
    releases: Iterator[Tensor]


class Target(ABC):
    """Something that makes private releases.

    Attributes:
        name: The name of the target in reports.
        claim: The claim that is made of it.
        outputs: The parameters that the release consists of, in order.
        handles_non_finite: Whether it claims to bound records that are NaN or infinite, too.
        starts_afresh: Whether every run begins at its first step. What keeps state from call to call does not.
        processes: Number of processes that make a release together, each with a share of the noise.
    """

    name: str
    claim: Claim
    outputs: list[Output]
    handles_non_finite: bool = True
    starts_afresh: bool = True
    processes: int = 1

    @abstractmethod
    def release(self, records: Sequence[Record], noise: Script | None = None) -> Tensor:
        """Makes one release of these records, times the expected batch size: ``(d,)`` in float64.

        Args:
            records: The records of the batch.
            noise: The script to serve in place of the noise. If None, the noise is the target's own.
        """

    @abstractmethod
    def run(self, records: Sequence[Record], steps: int, *, noise_off: bool = False) -> SampledRun:
        """Trains for some steps on these records as the data set, batches (and noise) being the target's own."""

    @abstractmethod
    def blocks(self, most: int, generator: torch.Generator) -> list[Block]:
        """Returns blocks of every layer: the first, the last, and others at random, at most ``most`` of each."""

    @abstractmethod
    def null(self) -> Record:
        """Returns a record that contributes nothing but its presence."""

    @abstractmethod
    def together(self, records: Sequence[Record]) -> Record:
        """Returns one record with the gradients of several, which are of different layers."""

    @abstractmethod
    def ordinary(self, count: int, generator: torch.Generator) -> list[Record]:
        """Returns records as data would give them."""

    def mates(self, generator: torch.Generator) -> list[Record]:
        """Returns a few cheap records to fill large batches with. They should by turns be too long and ``SHORT``."""
        return self.ordinary(4, generator)

    @abstractmethod
    def hostile(self, generator: torch.Generator) -> list[Hostile]:
        """Returns records that are made to move the release further than they may."""

    @property
    def size(self) -> int:
        """How many numbers a release has."""
        return sum(output.size for output in self.outputs)

    @property
    def left_out(self) -> list[str]:
        """Names of trained layers to which :meth:`blocks` can send nothing."""
        return []

    @property
    def largest_gain(self) -> float:
        """The most by which public post-processing stretches the clipped sum."""
        return 1.0

    @cached_property
    def controls_noise(self) -> bool:
        """Whether the noise obeys a script; if not, only statistics can be made."""
        first, second = (self.release([self.null()] * 2, Script()) for _ in range(2))
        return bool(torch.equal(first, second))
