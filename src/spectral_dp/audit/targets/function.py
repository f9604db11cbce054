"""Any function of per-sample gradients as a target: the protocol for code of your own.

    def release(gradients: Tensor) -> Tensor: ...

``gradients`` is ``(n, d)``, one row a sample, not clipped, ``n`` may be zero; the result is ``(d,)``, what your
optimizer would be given: clipped, summed, noised and divided by the *expected* batch size (or not divided, if you say
that it returns the sum). Draw the noise with torch (``torch.randn``, ``torch.normal``, ...; any generator): the exact
audits then take its place for the time of a call. Noise from elsewhere works too, but leaves only the statistical
audits.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from spectral_dp.audit.targets.noise_control import Script, TorchNoise
from spectral_dp.audit.targets.target import (
    BEYOND,
    LONG,
    SHORT,
    Block,
    Claim,
    Hostile,
    Kind,
    Output,
    Record,
    SampledRun,
    Target,
)
from spectral_dp.mechanism.transforms import get_transform
from spectral_dp.training.coins import SeededCoins
from spectral_dp.training.sampling import PoissonLoader

Release = Callable[[Tensor], Tensor]


class FunctionTarget(Target):
    """A release function behind the protocol of this module.

    Args:
        function: The function to audit.
        claim: The claim that is made of it.
        dimension: The length ``d`` of the gradients that the function is given.
        returns: Whether it returns the mean (the sum over the expected batch size) or the sum.
        name: The name of the target in reports. If None, it is the name of the function.
        dtype: The type of the gradients.
        seed: Seed of the sampled batches of :meth:`run`. If None, they are drawn afresh.
        released: How many numbers it returns. If None, as many as a gradient has.
    """

    starts_afresh = False

    def __init__(
        self,
        function: Release,
        claim: Claim,
        *,
        dimension: int = 64,
        returns: Literal["mean", "sum"] = "mean",
        name: str | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int | None = None,
        released: int | None = None,
    ) -> None:
        if dimension < 2:
            raise ValueError(f"dimension must be at least 2, got {dimension}")
        self.function, self.claim, self.dimension = function, claim, dimension
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self._scale = 1.0 if returns == "sum" else claim.expected_batch_size
        self._dtype, self._seed, self._runs = dtype, seed, itertools.count()
        self.outputs = [Output("gradient", (released or dimension,), claim.noise_std)]

    def release(self, records: Sequence[Record], noise: Script | None = None) -> Tensor:
        """Returns what the function makes of these gradients."""
        rows = torch.stack(list(records)) if records else torch.zeros(0, self.dimension)
        try:
            with nullcontext() if noise is None else TorchNoise(noise):
                released = self.function(rows.to(self._dtype))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{self.name} failed on {len(rows)} gradients of length {self.dimension}: {found}"
            ) from error
        return self._checked(released).detach().double() * self._scale

    def run(self, records: Sequence[Record], steps: int, *, noise_off: bool = False) -> SampledRun:
        """Trains on batches from :meth:`batches`."""
        batches = itertools.islice(self.batches(len(records)), steps)
        releases = (self.release([records[i] for i in batch], Script() if noise_off else None) for batch in batches)
        return SampledRun(self.claim.sample_rate, releases)

    def batches(self, records: int) -> Iterator[list[int]]:
        """Poisson batches of our own loader, without end: a function of gradients does not sample by itself."""
        coins = None
        if self._seed is not None:  # every run tosses coins of its own
            coins = SeededCoins(self._seed + next(self._runs), reproducibility_over_privacy=True)
        data = TensorDataset(torch.arange(records))
        loader = PoissonLoader(data, batch_size=self.claim.sample_rate * records, coins=coins)
        while True:
            for (indices,) in loader:
                yield indices.tolist()

    def blocks(self, most: int, generator: torch.Generator) -> list[Block]:
        """Returns two blocks: the coordinates as they are, and their Fourier spectrum."""
        d, everything = self.dimension, torch.arange(self.dimension)
        fourier = get_transform("fourier")
        frequency = fourier.frequencies(d).flatten().tolist()
        plain = tuple(f"coordinate {i}" for i in range(d))
        spectrum = tuple(f"frequency {f}, coordinate {i}" for i, f in enumerate(frequency))
        plain_kinds = (*(Kind.INTERIOR,) * (d - 1), Kind.LAST)
        return [
            Block("gradient", "coordinates", torch.eye(d).double(), plain, plain_kinds, everything, lambda s: s),
            Block("gradient", "spectrum", fourier.basis(d), spectrum, spectrum_kinds(d), everything, lambda s: s),
        ]

    def null(self) -> Record:
        """Returns a gradient of zeros."""
        return torch.zeros(self.dimension).double()

    def together(self, records: Sequence[Record]) -> Record:
        """Returns the sum of the gradients."""
        return torch.stack(list(records)).sum(0)

    def ordinary(self, count: int, generator: torch.Generator) -> list[Record]:
        """Returns normal vectors about as long as the clipping bound."""
        rows = torch.randn(count, self.dimension, generator=generator).double()
        return list(rows * self.claim.max_grad_norm / self.dimension**0.5)

    def mates(self, generator: torch.Generator) -> list[Record]:
        """Returns stretched records. The first has one number only: the others show the noise as it was drawn."""
        rows, bound = self.ordinary(4, generator), self.claim.max_grad_norm
        rows[0] = torch.eye(self.dimension).double()[self.dimension // 2]
        lengths = (LONG, SHORT[0], LONG, SHORT[1])
        return [bound * length * row / row.norm() for length, row in zip(lengths, rows, strict=True)]

    def hostile(self, generator: torch.Generator) -> list[Hostile]:
        """Returns records that are too long by little and by much, tiny, flat, alternating and not finite."""
        (x,) = self.ordinary(1, generator)
        return hostile_vectors(x, self.claim.max_grad_norm)

    def _checked(self, released: object) -> Tensor:
        where = f"{self.name}(gradients of shape (n, {self.dimension}))"
        if not isinstance(released, Tensor):
            raise TypeError(f"{where} must return a torch.Tensor, got {type(released).__name__}")
        if tuple(released.shape) != (self.size,):
            raise ValueError(
                f"{where} must return one number a coordinate, shape ({self.size},), got {tuple(released.shape)}: "
                "return what one step would give the optimizer, not something per sample"
            )
        if not released.is_floating_point():
            raise ValueError(f"{where} must return real floating-point numbers, got {released.dtype}")
        return released


def hostile_vectors(x: Tensor, bound: float) -> list[Hostile]:
    """Returns vectors made of an ordinary one: too long by little and by much, tiny, flat, alternating, not finite.

    Args:
        x: An ordinary vector, ``(d,)``.
        bound: The length to which vectors are clipped.
    """
    nan, inf, both = x.clone(), x.clone(), x.clone()
    nan[len(x) // 2] = torch.nan
    inf[0] = torch.inf
    both[0], both[-1] = torch.inf, -torch.inf
    alternating = torch.tensor([1.0, -1.0]).double().repeat(len(x))[: len(x)]
    finite = {"ordinary": x, "x 1e6": x * 1e6, "x 1e15": x * 1e15, "x 1e-20": x * 1e-20}
    unit = x * bound / x.norm()
    finite |= {f"{times:+g} bounds": times * unit for length in BEYOND for times in (length, -length)}
    finite |= {"flat": torch.full_like(x, 1e3), "alternating": alternating * 1e3, "one number": 1e4 * (x == x[0])}
    not_finite = {"NaN": nan, "infinite": inf, "both infinities": both}
    return [Hostile(n, r, n in finite) for n, r in (finite | not_finite).items()]


def spectrum_kinds(d: int) -> tuple[Kind, ...]:
    """Returns the classes of the real Fourier coordinates of ``d`` samples."""
    last = Kind.NYQUIST if d % 2 == 0 else Kind.LAST
    return (Kind.DC, *(Kind.INTERIOR,) * (d - 2), last)[:d]


def load_function(path: str) -> Release:
    """Loads a function that is given as ``FILE.py:callable``."""
    file, _, attribute = path.rpartition(":")
    if not file or not attribute:
        raise ValueError(f"give the function as FILE.py:callable, got {path!r}")
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}: give the function as FILE.py:callable")
    spec = importlib.util.spec_from_file_location(f"audited_{Path(file).stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their own
    try:
        spec.loader.exec_module(module)
        function = getattr(module, attribute)
    except Exception as error:
        raise ValueError(f"cannot load {path}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"{path} is a {type(function).__name__}, not a function")
    return function
