"""Algorithm 1 of the paper (Spectral-DP perturbation), changed so that it is private.

    z = a * (T g)                               transform; filter (pre-gain)
    c = min(1, C / ||z||)                       clip
    s = sum_b c_b z_b + N(0, (σ C)² I)          sum, noise once, on the kept coordinates
    g~ = T^t (b * s) / divisor                  filter (post-gain), inverse transform, public constant

:func:`perturb` applies it to one query, :func:`perturb_sum` to a batch of records. Both use the same three steps,
:meth:`Projection.analyse`, :func:`add_noise` and :meth:`Projection.synthesise`, and so does training.

Three things differ from the printed algorithm, because it is not private or wastes signal (see ``docs/privacy.md``):

* The noise is added to *real* coordinates. Real noise on complex coefficients leaves the odd part of the signal
  without noise.
* Coordinates that will be dropped are dropped before clipping, not after it.
* The filter counts real degrees of freedom.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from spectral_dp.mechanism.clipping import Clipped, clip_and_sum, clip_each, row_norms
from spectral_dp.mechanism.filters import Filter, LowPassFilter
from spectral_dp.mechanism.noise import NoiseSource, SecureNoise
from spectral_dp.mechanism.projection import Projection
from spectral_dp.mechanism.transforms import Transform, TransformName, get_transform
from spectral_dp.relations import Relation


def perturb(
    query: Tensor,
    *,
    sensitivity: float,
    noise_multiplier: float,
    filter_ratio: float = 0.0,
    filter: Filter | None = None,
    transform: TransformName | Transform = "fourier",
    dims: int | Sequence[int] = -1,
    batch_dims: int = 0,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    noise: NoiseSource | None = None,
) -> Tensor:
    """Releases a query with spectral Gaussian noise (Algorithm 1).

    Formal guarantee. The output is that of a Gaussian mechanism with the given noise multiplier, after post-processing:

    * Its ``(ε, δ)`` is ``accounting.gaussian_epsilon(noise_multiplier, δ)``, whatever the transform and the filter.
    * It holds for data sets that are neighbours under ``relation``.
    * It assumes *either* that the query is the contribution of one record (zero if the record is absent), *or* that
      neighbours under add-or-remove-one change the query by at most ``sensitivity`` already, and no pre-gain exceeds
      one. (Clipping is a projection onto a ball, so it does not increase the distance of two queries.)

    Args:
        query: A real tensor of any shape, which is clipped as a whole.
        sensitivity: ``S``, the bound on the Euclidean norm to which the filtered query is clipped.
        noise_multiplier: ``σ``, the deviation of the noise in units of the sensitivity.
        filter_ratio: ``ρ``, the fraction of real degrees of freedom to drop. The same as ``filter=LowPassFilter(ρ)``.
        filter: A filter, in place of ``filter_ratio``.
        transform: A transform or its name (see :mod:`spectral_dp.mechanism.transforms`).
        dims: The one or two dimensions to transform.
        batch_dims: The number of leading dimensions that number *independent queries*. Each query is clipped and gets
            noise by itself, and the guarantee is for each. If a record is in several queries, they compose.
        relation: Which data sets are neighbours. Replacing a record can change the query twice as much, so the noise
            is twice as large.
        noise: The source of the noise. By default a new :class:`~spectral_dp.mechanism.noise.SecureNoise`.

    Returns:
        The noisy query, with the shape and dtype of ``query``.
    """
    if not 0 <= batch_dims < query.ndim:
        raise ValueError(f"batch_dims must leave at least one of the {query.ndim} dimensions, got {batch_dims}")
    projection, dims, last = _plan(query, batch_dims, filter_ratio, filter, transform, dims)
    batch_shape = query.shape[:batch_dims]
    queries = query.reshape(math.prod(batch_shape), *query.shape[batch_dims:])
    counted = projection.analyse(queries.movedim(dims, last), counted=True)
    z, norms = projection.kept_of_counted(counted), row_norms(counted)
    clipped = clip_each(z, _positive("sensitivity", sensitivity), norms)
    noisy = add_noise(clipped, noise_multiplier, noise or SecureNoise(), relation)
    return projection.synthesise(noisy).movedim(last, dims).reshape(query.shape)


def perturb_sum(
    samples: Tensor,
    *,
    max_norm: float,
    noise_multiplier: float,
    divisor: float = 1.0,
    filter_ratio: float = 0.0,
    filter: Filter | None = None,
    transform: TransformName | Transform = "fourier",
    dims: int | Sequence[int] = -1,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
    noise: NoiseSource | None = None,
) -> Tensor:
    """Releases the sum of one contribution per record: clip each, sum, add noise once, divide by a public constant.

    Formal guarantee. The output is that of a Gaussian mechanism on the sum over records, as in :func:`perturb`:

    * What one record adds to the sum is bounded by ``max_norm``, whatever it contains.
    * The guarantee holds for neighbours under ``relation``.
    * The number of records may be secret, and may be zero: neither the noise nor the divisor depends on it.

    Args:
        samples: One contribution per record, ``(B, ...)``. ``B`` can be 0.
        max_norm: ``C``, the bound on the norm of each filtered contribution.
        noise_multiplier: ``σ``, the deviation of the noise in units of the sensitivity.
        divisor: A *public* constant to divide by, such as the expected batch size.
        filter_ratio: See :func:`perturb`.
        filter: See :func:`perturb`.
        transform: See :func:`perturb`.
        dims: The one or two dimensions to transform. The first one numbers the records and is not allowed.
        relation: See :func:`perturb`.
        noise: See :func:`perturb`.

    Returns:
        The noisy sum divided by ``divisor``, with the shape ``samples.shape[1:]``.
    """
    projection, dims, last = _plan(samples, 1, filter_ratio, filter, transform, dims)
    counted = projection.analyse(samples.movedim(dims, last), counted=True)
    z, norms = projection.kept_of_counted(counted), row_norms(counted)
    clipped = clip_and_sum(z, _positive("max_norm", max_norm), norms)
    noisy = add_noise(clipped, noise_multiplier, noise or SecureNoise(), relation)
    return projection.synthesise(noisy).movedim(last, dims) / _positive("divisor", divisor)


def add_noise(
    clipped: Clipped,
    noise_multiplier: float,
    noise: NoiseSource,
    relation: Relation = Relation.ADD_OR_REMOVE_ONE,
) -> Tensor:
    """Returns a clipped value plus Gaussian noise (line 3 of Algorithm 1). Noise is added nowhere else.

    Formal guarantee. Independent ``N(0, (σ Δ)²)`` noise is added to every number in ``clipped.value``, where ``Δ`` is
    the sensitivity that the clipped value itself declares for ``relation``.

    Args:
        clipped: The value, which declares its sensitivity.
        noise_multiplier: ``σ``. With 0 the value is returned without noise, and a warning is given.
        noise: The source of the noise.
        relation: Which data sets are neighbours.

    Raises:
        ValueError: If the noise multiplier is negative or not finite, or the sensitivity is infinite.
        TypeError: If the value is complex: noise on its real part alone would leave the imaginary one as it is.
    """
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier must be finite and not negative, got {noise_multiplier}")
    value = clipped.value
    if not value.is_floating_point():
        raise TypeError(f"noise is for real numbers, got {value.dtype}: use torch.view_as_real(x) or x.float()")
    if noise_multiplier == 0:
        warnings.warn("noise_multiplier is 0: the release is not private", RuntimeWarning, stacklevel=3)
        return value.clone()  # new, as with noise: what is released may be changed in place
    scale = noise_multiplier * clipped.sensitivity(relation)
    if not math.isfinite(scale):
        raise ValueError(f"noise of infinite scale: set a finite clipping bound (it is {clipped.max_norm})")
    drawn = noise.normal(value.shape, dtype=value.dtype, device=value.device)
    return torch.add(value, drawn, alpha=scale, out=drawn)


#: A function that adds noise to several clipped values. Its arguments are those of :func:`add_noise_to_each`.
NoisySums: TypeAlias = Callable[[Iterable[Clipped], float, NoiseSource, Relation], Iterator[Tensor]]


def add_noise_to_each(
    values: Iterable[Clipped], noise_multiplier: float, noise: NoiseSource, relation: Relation
) -> Iterator[Tensor]:
    """Yields each clipped value plus noise, by :func:`add_noise`. A value is asked for when its turn comes."""
    return (add_noise(clipped, noise_multiplier, noise, relation) for clipped in values)


def _plan(
    query: Tensor,
    batch_dims: int,
    filter_ratio: float,
    filter: Filter | None,
    transform: TransformName | Transform,
    dims: int | Sequence[int],
) -> tuple[Projection, tuple[int, ...], tuple[int, ...]]:
    """Checks the arguments that :func:`perturb` and :func:`perturb_sum` have in common.

    Returns:
        The projection, the dimensions to transform, and the last dimensions, to which they must be moved.
    """
    if filter is not None and filter_ratio != 0:
        raise ValueError(f"give filter_ratio={filter_ratio} or filter={filter!r}, not both")
    dims = (dims,) if isinstance(dims, int) else tuple(dims)
    for d in dims:
        if not -query.ndim <= d < query.ndim or d % query.ndim < batch_dims:
            first = f"the first {batch_dims} number records or queries" if batch_dims else "none is reserved"
            raise ValueError(f"cannot transform dimension {d} of a tensor with {query.ndim} dimensions ({first})")
    dims = tuple(d % query.ndim - query.ndim for d in dims)  # counted from the end: valid with and without the batch
    transform = get_transform(transform)
    gains = (filter or LowPassFilter(filter_ratio)).gains(transform, tuple(query.shape[d] for d in dims))
    if gains.is_identity:
        # T is orthogonal: clipping and white noise in its coordinates *are* clipping and white noise in the signal.
        transform = get_transform("identity")
    return Projection(transform, gains), dims, tuple(range(-len(dims), 0))


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be finite and positive, got {value}")
    return value
