"""Norms of sums of outer products, never smaller than what is clipped by them.

A rule computes a sample's norm one way and the clipped sum another way, so their rounding errors differ. All norms here
are rounded up by what those errors can amount to. They come in float64, because squares of short lengths underflow in
float32 too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spectral_dp.mechanism.clipping import underflow

#: Bound on the rounding error of a sum over two Gram matrices, in ulps of the squared sum of lengths.
#: Ten times the largest seen on inputs made to cancel.
GRAM_ROUNDING = 16

#: Products that may be added up one after the other, as small matrix products do.
PIECE = 256


def token_norms(x: Tensor, dA: Tensor, x_errors: Tensor | None = None) -> Tensor:
    """Squared norms ``(B,)`` of ``sum_t dA[b,t] x[b,t]^T`` for ``x (B, T, n)``, ``dA (B, T, m)``, real or complex.

    Through the two ``T x T`` Gram matrices, ``sum_tt' <x_t, x_t'> <dA_t, dA_t'>``, or through the gradient itself, a
    few samples at a time, whichever is cheaper. Never the sum of the tokens' norms, which is another number.

    Args:
        x: As above.
        dA: As above.
        x_errors: How far each ``x_t`` can be from the one that the sum is made of, ``(B, T)``; None if they are the
            same.
    """
    tokens, n, m = x.shape[1], x.shape[2], dA.shape[2]
    if x.is_complex():
        n, m = 2 * n, 2 * m  # squares, of real and imaginary parts
    # Not by vector_norm, which adds up one after the other: long rows would lose more than the rounding guard.
    x_lengths, dA_lengths = squares(x).sum(2).sqrt(), squares(dA).sum(2).sqrt()
    if tokens == 1:
        most = outer_norms(x_lengths if x_errors is None else x_lengths + x_errors, dA_lengths, n, m)
        return most.double().square().squeeze(1)
    if tokens * (x.shape[2] + dA.shape[2]) <= x.shape[2] * dA.shape[2]:
        gram = gram_matrices(x) * gram_matrices(dA).conj()
        squared, from_gram = (gram.real if gram.is_complex() else gram).sum((1, 2)), True
    else:
        pieces = zip(*(t.split(max(1, (1 << 20) // (n * m))) for t in (x, dA)), strict=True)
        squared, from_gram = torch.cat([squares(d.mH @ v).sum((1, 2)) for v, d in pieces]), False
    return rounded_up(squared, x_lengths, dA_lengths, n, m, from_gram=from_gram, x_errors=x_errors)


def rounded_up(
    squared_norms: Tensor,
    x_lengths: Tensor,
    dA_lengths: Tensor,
    n: int,
    m: int,
    *,
    from_gram: bool,
    x_errors: Tensor | None = None,
) -> Tensor:
    """Squared norms ``(B,)`` of ``sum_t dA_t x_t^T``, plus what rounding can have hidden.

    Formal guarantee. Terms may cancel. Then the norm consists of rounding errors, and so does the sum that is clipped
    by it, but not of the same ones; and squares of very small numbers underflow to zero, though their product with a
    very large one does not. A sample made for either would be clipped too little. A sum of ``T`` outer products errs by
    at most ``T`` ulps of their total length, a squared norm summed from Gram matrices by ``GRAM_ROUNDING`` ulps of its
    square, and a sum of ``n`` squares by ``n`` times the smallest normal number. Added to the norm, these keep the clip
    on the private side; for ordinary samples they are not noticeable.

    Args:
        squared_norms: As computed.
        x_lengths: ``|x_t|``, ``(B, T)``.
        dA_lengths: ``|dA_t|``, ``(B, T)``.
        n: Numbers in each ``x_t``.
        m: Numbers in each ``dA_t``.
        from_gram: Whether the norms were summed from Gram matrices.
        x_errors: See :func:`token_norms`.
    """
    dtype, tokens = x_lengths.dtype, x_lengths.shape[1]
    eps = torch.finfo(dtype).eps
    length = (x_lengths * dA_lengths).sum(1)
    most = outer_norms(x_lengths if x_errors is None else x_lengths + x_errors, dA_lengths, n, m).sum(1)
    terms = tokens if tokens > 1 else 0
    lost = underflow(tokens**2 if from_gram else n * m, dtype)  # where the terms of the squared norm itself underflow
    norms = squared_norms.clamp(min=0).sqrt() + (most - length) + terms * eps * most + lost
    return norms.double().square() + (GRAM_ROUNDING * eps * most.double().square() if from_gram else 0)


def gram_matrices(t: Tensor) -> Tensor:
    """``<t_bs, t_bs'>`` of all pairs of tokens, ``(B, T, n) -> (B, T, T)``.

    In pieces: a product of few, long rows is added up one after the other, and a record made for it (an image of one
    colour will do) would lose more than the rounding guard.
    """
    first, *others = t.split(PIECE, dim=2)
    gram = first @ first.mH
    for piece in others:
        gram += piece @ piece.mH
    return gram


def outer_norms(x_lengths: Tensor, dA_lengths: Tensor, n: int, m: int) -> Tensor:
    """Norms of ``dA x^T``, plus what the underflow of squares can have hidden; see :func:`rounded_up`."""
    dtype = x_lengths.dtype
    return (x_lengths + underflow(n, dtype)) * (dA_lengths + underflow(m, dtype))


def bias_norms(dA: Tensor) -> Tensor:
    """Squared norms ``(B,)`` of ``sum_t dA[b,t]`` for ``dA (B, T, m)``, plus what rounding can have hidden.

    Formal guarantee. The clipped sum adds up the tokens again, perhaps of fewer samples or in another layout, hence in
    another order. Where they cancel, the two orders have nothing but their rounding errors in common.
    """
    tokens, m = dA.shape[1:]
    lengths = squares(dA.sum(1) if tokens != 1 else dA[:, 0]).sum(1).sqrt() + underflow(m, dA.dtype)
    if tokens > 1:
        lengths = lengths + tokens * torch.finfo(dA.dtype).eps * squares(dA.abs().sum(1)).sum(1).sqrt()
    return lengths.double().square()


def transform_error(numbers: int, dtype: torch.dtype) -> float:
    """How far two ways to compute an orthonormal transform can be apart, in lengths of what is transformed.

    A few ulps for every level of a fast transform; a short one is a matrix product and errs no more.
    """
    return 16 * (math.log2(max(numbers, 1)) + 1) * torch.finfo(dtype).eps


def squares(t: Tensor) -> Tensor:
    """``|t|²``, real or complex. Their ``sum`` is exact to a few ulps, unlike that of ``vector_norm`` on long rows."""
    return t.real.square() + t.imag.square() if t.is_complex() else t.square()
