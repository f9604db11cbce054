"""Weighted sums over samples and tokens, from which the rules build their clipped sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: The size of temporaries, which are made for a few samples at a time.
CHUNK_BYTES = 4 * 2**20


def in_chunks(samples: int, numbers_each: int, like: Tensor) -> Iterator[slice]:
    """Returns slices of a batch, at least one, so small that the temporaries of each take a few megabytes.

    Such temporaries stay in the cache and their memory is reused. New memory must be mapped (page faults), which can
    cost more than the arithmetic. A slice has at least two samples, one per core.

    Args:
        samples: The number of samples in the batch.
        numbers_each: The number of temporary entries per sample.
        like: A tensor of the dtype of the temporaries.
    """
    size = max(2, CHUNK_BYTES // max(numbers_each * like.element_size(), 1))
    return (slice(start, start + size) for start in range(0, max(samples, 1), size))


def as_tokens(t: Tensor) -> Tensor:
    """Flattens all token dimensions into one, ``(B, ..., n) -> (B, T, n)``."""
    return t[:, None] if t.ndim == 2 else t.flatten(1, -2)


def over_tokens(dA: Tensor) -> Tensor:
    """Returns the sum over tokens, ``(B, T, m) -> (B, m)``, which is the gradient of a bias."""
    return dA[:, 0] if dA.shape[1] == 1 else dA.sum(1)


def merge_tokens(uses: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenates the tokens of several uses ``(x, dA)`` of a layer whose gradient is a sum over tokens."""
    return torch.cat([as_tokens(x) for x, _ in uses], dim=1), torch.cat([as_tokens(dA) for _, dA in uses], dim=1)


def weigh(x: Tensor, dA: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``x`` and ``dA``, the smaller one times ``c`` per sample, so that their product is weighted by ``c``."""
    if x.numel() < dA.numel():
        return scale(x, c), dA
    return x, scale(dA, c)


def weighted_sum(c: Tensor, z: Tensor) -> Tensor:
    """Returns ``sum_b c_b z_b``, ``(B, ...) -> (...)``, without a copy in any order of the dimensions in memory."""
    if z.ndim <= 2:  # a vector, or a scalar parameter: one number per sample
        return c.to(z.dtype) @ z
    order = memory_order(z)
    stored = z.permute(order)
    total = (c.to(z.dtype) @ stored.flatten(1)).view(stored.shape[1:])
    return total.permute([order.index(dim) - 1 for dim in range(1, z.ndim)])


def memory_order(z: Tensor) -> list[int]:
    """Returns the dimensions of ``(B, ...)`` in their order in memory, samples first.

    Per-sample gradients are large. In this order they can be flattened without a copy.
    """
    return [0, *sorted(range(1, z.ndim), key=z.stride, reverse=True)]


def scale(t: Tensor, c: Tensor) -> Tensor:
    """Returns ``c_b t_b`` for every sample."""
    return t * c.to(t.dtype).view(-1, *[1] * (t.ndim - 1))
