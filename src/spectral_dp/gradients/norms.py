"""Norms of sums of outer products, rounded up so that they are never too small for clipping.

A rule computes the norm of a sample and the clipped sum in different ways, so their rounding errors differ. All norms
here are increased by a bound on these errors. They are returned in float64, because squares of small lengths underflow
in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spectral_dp.gradients.sums import in_chunks, over_tokens
from spectral_dp.mechanism.clipping import underflow

#: A bound on the rounding error of a sum over two Gram matrices, in ulps of the squared sum of lengths. It is ten times
#: the largest error that was measured on inputs whose terms cancel.
GRAM_ROUNDING = 16

#: The number of products that a matrix product may add one after the other. A record that was made for it then loses
#: 8e-6 of each of two squares, so as much of the norm, and of 256 twice that: more than the rounding guard.
PIECE = 128

#: The number of squares that ``vector_norm`` may add in one go. Of numbers that lie side by side it makes four or eight
#: sums, whichever the processor has, so of this many it loses at most 4e-6 of the length.
LONG = 512


def token_norms(x: Tensor, dA: Tensor, x_errors: Tensor | None = None) -> Tensor:
    """Returns the squared norms ``(B,)`` of ``sum_t dA[b,t] x[b,t]^T``, rounded up.

    They are computed from the two ``T x T`` Gram matrices, as ``sum_tt' <x_t, x_t'> <dA_t, dA_t'>``, or from the
    gradients themselves, a few samples at a time, whichever is cheaper. (The sum of the tokens' norms would be wrong.)

    Args:
        x: The inputs ``(B, T, n)``, real or complex.
        dA: The output gradients ``(B, T, m)``, real or complex.
        x_errors: Bounds ``(B, T)`` on the distance of each ``x_t`` from the input that the clipped sum uses; None if
            it uses the same numbers.
    """
    tokens, n, m = x.shape[1], x.shape[2], dA.shape[2]
    if x.is_complex():
        n, m = 2 * n, 2 * m  # real and imaginary parts are squared
    uses_gram = tokens > 1 and tokens * (x.shape[2] + dA.shape[2]) <= x.shape[2] * dA.shape[2]
    if uses_gram:
        squared, x_lengths, dA_lengths = _gram_norms(x, dA)
    else:
        x_lengths, dA_lengths = _lengths(x), _lengths(dA)
        if tokens == 1:
            most = outer_norms(x_lengths if x_errors is None else x_lengths + x_errors, dA_lengths, n, m)
            return most.double().square().squeeze(1)
        pieces = zip(*(t.split(max(1, (1 << 20) // (n * m))) for t in (x, dA)), strict=True)
        squared = torch.cat([squares(d.mH @ v).sum((1, 2)) for v, d in pieces])
    return rounded_up(squared, x_lengths, dA_lengths, n, m, from_gram=uses_gram, x_errors=x_errors)


def _lengths(t: Tensor) -> Tensor:
    """Returns the lengths ``(B, T)`` of tokens ``(B, T, n)``.

    ``vector_norm`` writes no squares to memory, but adds its terms one after the other: of long rows it is given
    pieces, which are added in float64, because it would lose more than the rounding guard. Of numbers that do not lie
    side by side it makes a single sum, which loses too much even in pieces, and of complex ones it is slow: their
    squares are written, of a few samples at a time.
    """
    if t.is_complex() or t.stride(2) != 1:
        chunks = in_chunks(t.shape[0], t.shape[1] * t.shape[2] * (2 if t.is_complex() else 1), t.real)
        return torch.cat([squares(t[rows]).sum(2).sqrt() for rows in chunks])
    if t.shape[2] <= LONG:
        return torch.linalg.vector_norm(t, dim=2)
    whole = t.shape[2] - t.shape[2] % LONG
    pieces = torch.linalg.vector_norm(t[..., :whole].unflatten(2, (-1, LONG)), dim=3)
    rest = torch.linalg.vector_norm(t[..., whole:], dim=2, keepdim=True)
    return torch.linalg.vector_norm(torch.cat([pieces, rest], dim=2), dim=2, dtype=torch.float64).to(t.dtype)


def _gram_norms(x: Tensor, dA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns squared norms ``(B,)`` from Gram matrices, and the lengths ``(B, T)`` of tokens on their diagonals.

    Gram matrices are symmetric: of the blocks of token pairs below the diagonal, twice the sum counts, and those above
    are not computed.
    """
    half = (x.shape[1] + 1) // 2
    P, Q = (gram_matrices(t, t[:, :half]) for t in (x, dA))
    last_P, last_Q = (gram_matrices(t[:, half:]) for t in (x, dA))
    lengths = [
        torch.cat([g.diagonal(dim1=1, dim2=2).real for g in grams], dim=1).clamp(min=0).sqrt()
        for grams in ((P[:, :half], last_P), (Q[:, :half], last_Q))
    ]
    products = _products(P, Q)
    products[:, half:] *= 2
    return products.sum((1, 2)) + _products(last_P, last_Q).sum((1, 2)), lengths[0], lengths[1]


def _products(P: Tensor, Q: Tensor) -> Tensor:
    return P.real * Q.real + P.imag * Q.imag if P.is_complex() else P * Q


def rounded_up(
    squared_norms: Tensor,
    x_lengths: Tensor,
    dA_lengths: Tensor,
    n: int,
    m: int,
    *,
    from_gram: bool,
    added: int = 0,
    x_errors: Tensor | None = None,
) -> Tensor:
    """Returns squared norms ``(B,)`` of ``sum_t dA_t x_t^T``, plus a bound on their rounding error.

    Formal guarantee. No sample is clipped too little because of rounding, even a sample that was made for it. Without
    the bound, two kinds of samples would be: if terms cancel, norm and clipped sum both consist of rounding errors,
    but of different ones; and squares of very small numbers underflow to zero, although their product with a very
    large number does not. The bound covers these errors, and is negligible for ordinary samples:

    * A sum of ``T`` outer products errs by at most ``T`` ulps of their total length.
    * A squared norm that is summed from Gram matrices errs by at most ``GRAM_ROUNDING`` ulps of the square of that
      length, and by one more for each of ``added`` matrices.
    * A sum of ``n`` squares loses at most ``n`` times the smallest normal number by underflow.

    Args:
        squared_norms: The squared norms as computed, ``(B,)``.
        x_lengths: ``|x_t|``, ``(B, T)``.
        dA_lengths: ``|dA_t|``, ``(B, T)``.
        n: The number of entries of each ``x_t``.
        m: The number of entries of each ``dA_t``.
        from_gram: Whether the norms were summed from Gram matrices.
        added: How many Gram matrices were added one after the other, beforehand.
        x_errors: See :func:`token_norms`.
    """
    dtype, tokens = x_lengths.dtype, x_lengths.shape[1]
    eps = torch.finfo(dtype).eps
    length = (x_lengths * dA_lengths).sum(1)
    most = outer_norms(x_lengths if x_errors is None else x_lengths + x_errors, dA_lengths, n, m).sum(1)
    terms = tokens if tokens > 1 else 0
    lost = underflow(tokens**2 if from_gram else n * m, dtype)  # the terms of the squared norm underflow, too
    norms = squared_norms.clamp(min=0).sqrt() + (most - length) + terms * eps * most + lost
    return norms.double().square() + ((GRAM_ROUNDING + added) * eps * most.double().square() if from_gram else 0)


def gram_matrices(t: Tensor, others: Tensor | None = None) -> Tensor:
    """Returns ``<t_bs, t_bs'>`` of all pairs of tokens, ``(B, T, n) -> (B, T, T)``, or ``<t_bs, others_bs'>``.

    The product is computed in pieces. A product of few long rows adds its terms one after the other, and some records
    (an image of one colour is enough) would lose more than the rounding guard.
    """
    left = t.split(PIECE, dim=2)
    right = left if others is None else others.split(PIECE, dim=2)
    gram = left[0] @ right[0].mH
    for a, b in zip(left[1:], right[1:], strict=True):
        gram += a @ b.mH  # not baddbmm, which goes on adding where the last piece ended
    return gram


def outer_norms(x_lengths: Tensor, dA_lengths: Tensor, n: int, m: int) -> Tensor:
    """Returns norms of ``dA x^T``, plus a bound on the underflow of squares; see :func:`rounded_up`."""
    dtype = x_lengths.dtype
    return (x_lengths + underflow(n, dtype)) * (dA_lengths + underflow(m, dtype))


def bias_norms(dA: Tensor) -> Tensor:
    """Returns squared norms ``(B,)`` of ``sum_t dA[b,t]`` for ``dA (B, T, m)``, plus a bound on their rounding error.

    Formal guarantee. A norm is never smaller than what the sample adds to the clipped sum. The clipped sum adds the
    tokens again, perhaps for fewer samples or in another layout, hence in another order. If tokens cancel, both results
    are rounding errors, and the bound covers the difference.
    """
    tokens, m = dA.shape[1:]
    lengths = _lengths(over_tokens(dA)[:, None]) + underflow(m, dA.dtype)
    if tokens > 1:
        chunks = in_chunks(dA.shape[0], tokens * m, dA)  # of all samples they would take as much memory as dA
        most = torch.cat([dA[rows].abs().sum(1, keepdim=True) for rows in chunks])
        lengths = lengths + tokens * torch.finfo(dA.dtype).eps * _lengths(most)
    return lengths.double().square().squeeze(1)


def transform_error(numbers: int, dtype: torch.dtype) -> float:
    """Returns a bound on the difference of two ways to compute an orthonormal transform, per length of its input.

    It is a few ulps for each level of a fast transform. A short transform is a matrix product, with no larger errors.
    """
    return 16 * (math.log2(max(numbers, 1)) + 1) * torch.finfo(dtype).eps


def squares(t: Tensor) -> Tensor:
    """Returns ``|t|²``, real or complex. Its ``sum`` is exact to a few ulps; ``vector_norm`` is not on long rows."""
    return t.real.square() + t.imag.square() if t.is_complex() else t.square()
