"""Weighted sums over samples and tokens, a few samples at a time: what the clipped sums of all rules are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: Temporaries of a batch are made for some samples at a time, as many as fit into this.
CHUNK_BYTES = 4 * 2**20


def in_chunks(samples: int, numbers_each: int, like: Tensor) -> Iterator[slice]:
    """Slices of a batch whose temporaries take a few megabytes (two samples or more: one per core), at least one.

    They stay in cache, and their memory is reused instead of being mapped (and page-faulted) anew, which can cost more
    than the arithmetic.
    """
    size = max(2, CHUNK_BYTES // (numbers_each * like.element_size()))
    return (slice(start, start + size) for start in range(0, max(samples, 1), size))


def as_tokens(t: Tensor) -> Tensor:
    """``(B, ..., n) -> (B, T, n)``."""
    return t[:, None] if t.ndim == 2 else t.flatten(1, -2)


def over_tokens(dA: Tensor) -> Tensor:
    """``(B, T, m) -> (B, m)``, summed: the gradient of a bias."""
    return dA[:, 0] if dA.shape[1] == 1 else dA.sum(1)


def merge_tokens(uses: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several uses of a layer whose gradient is a sum over tokens: all their tokens side by side."""
    return torch.cat([as_tokens(x) for x, _ in uses], dim=1), torch.cat([as_tokens(dA) for _, dA in uses], dim=1)


def weigh(x: Tensor, dA: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplies the smaller of ``x`` and ``dA`` by ``c``, sample by sample: a product of the two is then weighted."""
    if x.numel() < dA.numel():
        return scale(x, c), dA
    return x, scale(dA, c)


def weighted_sum(c: Tensor, z: Tensor) -> Tensor:
    """``sum_b c_b z_b``, ``(B, ...) -> (...)``, without a copy whatever the order of the dimensions in memory."""
    if z.ndim == 1:  # a scalar parameter has one number a sample
        return c.to(z.dtype) @ z
    order = memory_order(z)
    stored = z.permute(order)
    total = (c.to(z.dtype) @ stored.flatten(1)).view(stored.shape[1:])
    return total.permute([order.index(dim) - 1 for dim in range(1, z.ndim)])


def memory_order(z: Tensor) -> list[int]:
    """The dimensions of ``(B, ...)`` in the order in which they lie in memory, samples first.

    Per-sample gradients are large. Permuted so, they can be flattened without a copy.
    """
    return [0, *sorted(range(1, z.ndim), key=z.stride, reverse=True)]


def scale(t: Tensor, c: Tensor) -> Tensor:
    """``t_b c_b``."""
    return t * c.to(t.dtype).view(-1, *[1] * (t.ndim - 1))
