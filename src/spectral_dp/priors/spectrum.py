"""The principal axes of public vectors: the basis in which what a prior knows can be told from what it does not.

    M   = 1/n sum_i (x_i - μ)(x_i - μ)^t        the second moment of n vectors x_i, around their mean or around zero
    M   = U diag(λ) U^t                         λ_1 >= λ_2 >= ...
    s_i = (λ_i / λ_1 + damp)^-p                 gains, which even out the axes

The vectors are inputs of a dense layer, or features, of *generated* images (``generated_spectrum``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spectral_dp.mechanism.eigenvalue_filter import eigenvalue_gains
from spectral_dp.mechanism.public_basis import PublicBasis

_COLUMNS = 1024  # of a product in float32; such products are added up in float64
_LEAST = 1e-7  # of the largest eigenvalue: below, axes are rounding errors


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The principal axes of a set of public vectors.

    Formal guarantee. A spectrum of generated vectors is public: it may be used in every step, and nothing is charged.
    Whoever computes one from private records must release it with noise first; nothing here does.

    Attributes:
        mean: The mean ``μ``, ``(D,)`` in float32, or zeros if the moment is the plain one.
        basis: The axes ``U``, ``(D, k)`` in float32: orthonormal columns, from the largest eigenvalue to the smallest.
        eigenvalues: Their eigenvalues ``λ``, ``(k,)`` in float64, all positive.
    """

    mean: Tensor
    basis: Tensor
    eigenvalues: Tensor

    def __post_init__(self) -> None:
        size = tuple(self.basis.shape)
        if len(size) != 2 or self.mean.shape != size[:1] or self.eigenvalues.shape != size[1:] or 0 in size:
            raise ValueError(
                f"a spectrum has a mean (D,), a basis (D, k) and eigenvalues (k,), got {tuple(self.mean.shape)}, "
                f"{size} and {tuple(self.eigenvalues.shape)}"
            )
        falls = bool((self.eigenvalues.diff() <= 0).all())
        if not bool(torch.isfinite(self.eigenvalues).all()) or not falls or not float(self.eigenvalues[-1]) > 0:
            raise ValueError("eigenvalues must be finite, positive and in falling order")

    @property
    def rank(self) -> int:
        """The number ``k`` of axes."""
        return self.basis.shape[1]

    def gains(self, power: float, damp: float = 0.0) -> Tensor:
        """Returns ``(λ / λ_1 + damp)^-power``, ``(k,)`` in float64.

        Args:
            power: The exponent ``p``: 0 changes nothing, 1/2 gives all axes the same deviation.
            damp: Added to the relative eigenvalues, so that small ones do not blow up what is mostly noise.
        """
        return eigenvalue_gains(self.eigenvalues, power, damp)

    def as_basis(self, source: str = "generated images") -> PublicBasis:
        """Returns the axes as a transform, for ``SpectralConfig(input_bases={"fc": spectrum.as_basis()})``.

        The mean is not used: a layer's weight meets its input as it is. Compute the spectrum with ``centred=False``,
        so that the direction of the mean is an axis, too.

        Args:
            source: Where the vectors come from, for the privacy statement.
        """
        return PublicBasis(self.basis, self.eigenvalues, source)


def principal_axes(rows: Iterable[Tensor], *, count: int, rank: int | None = None, centred: bool = True) -> Spectrum:
    """Returns the spectrum of public vectors that come in parts.

    The memory is bounded: with ``n`` vectors of ``D`` numbers, either all vectors and an ``n x n`` matrix are held, or
    one part and a ``D x D`` matrix, whichever matrix is smaller.

    Args:
        rows: Parts of the vectors, each ``(m, D)``. They must not be private.
        count: How many vectors there are in all parts together.
        rank: The largest number of axes to return. By default all whose eigenvalues are above rounding errors.
        centred: Whether the moment is taken around the mean.
    """
    if count < 2 or (rank is not None and rank < 1):
        raise ValueError(f"axes need at least 2 vectors and a positive rank, got count={count}, rank={rank}")
    parts = iter(rows)
    first = next(parts, None)
    if first is None or first.ndim != 2 or not first.numel():
        raise ValueError(f"expected parts (m, D) of vectors, got {None if first is None else tuple(first.shape)}")
    size = first.shape[1]
    compute = _by_gram if count <= size else _by_moment
    with torch.inference_mode(False), torch.no_grad():
        return compute(_checked(first, parts, count), count, size, rank, centred)


def _checked(first: Tensor, others: Iterator[Tensor], count: int) -> Iterator[Tensor]:
    """Yields parts, and raises ``ValueError`` if they are not finite or not as many vectors as they should be."""
    seen = 0
    for part in itertools.chain([first], others):
        if not bool(torch.isfinite(part).all()):
            raise ValueError("some vectors are not finite, so they have no spectrum: look for overflows")
        seen += len(part)
        yield part.float()
    if seen != count:
        raise ValueError(f"expected {count} vectors in all parts together, got {seen}")


def _by_gram(parts: Iterator[Tensor], count: int, size: int, rank: int | None, centred: bool) -> Spectrum:
    """Returns the spectrum by the products of all pairs of vectors, which are not more than their numbers."""
    x = torch.empty(count, size)
    at = 0
    for part in parts:
        x[at : at + len(part)] = part[: count - at]
        at += len(part)
    mean = x.mean(0, dtype=torch.float64).float() if centred else torch.zeros(size)
    x -= mean
    gram = torch.zeros(count, count, dtype=torch.float64)
    for columns in x.split(_COLUMNS, dim=1):
        gram += columns @ columns.T
    values, vectors = _largest(gram / count, rank)
    axes = x.T @ (vectors / (count * values).sqrt()).float()
    return Spectrum(mean, _orthonormal(axes), values)


def _by_moment(parts: Iterator[Tensor], count: int, size: int, rank: int | None, centred: bool) -> Spectrum:
    """Returns the spectrum by the products of all pairs of numbers, which are fewer than the vectors."""
    moment, total = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    origin: Tensor | None = None
    for part in parts:
        if origin is None:  # near the mean, so that little cancels when the mean is taken off
            origin = part.mean(0) if centred else torch.zeros(size)
        for some in (part - origin).split(_COLUMNS):
            moment += some.T @ some
            total += some.sum(0, dtype=torch.float64)
    assert origin is not None
    shift = total / count
    moment /= count
    if centred:
        moment -= shift[:, None] * shift
    values, vectors = _largest(moment, rank)
    mean = origin.double() + shift if centred else torch.zeros(size)
    return Spectrum(mean.float(), vectors.float().contiguous(), values)


def _largest(symmetric: Tensor, rank: int | None) -> tuple[Tensor, Tensor]:
    """Returns the largest eigenvalues in falling order, and their eigenvectors as columns."""
    values, vectors = torch.linalg.eigh(symmetric)
    if not float(values[-1]) > 0:
        raise ValueError("all vectors are the same, so they have no axes: look at the settings of the images")
    number = int((values > _LEAST * values[-1]).sum())
    number = number if rank is None else min(number, rank)
    return values.flip(0)[:number].clone(), vectors.flip(1)[:, :number].contiguous()


def _orthonormal(axes: Tensor) -> Tensor:
    """Returns nearly orthonormal columns made orthonormal up to rounding, by a Cholesky factor of their products."""
    products = torch.zeros(axes.shape[1], axes.shape[1], dtype=torch.float64)
    for some in axes.split(_COLUMNS):
        products += some.T @ some
    factor = torch.linalg.cholesky(products)
    return torch.linalg.solve_triangular(factor.float(), axes.T, upper=False).T.contiguous()
