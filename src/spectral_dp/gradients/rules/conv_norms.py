"""Exact per-sample norms and clipped sums of Conv2d weight gradients.

Shapes
    x           (B, Ci, H, W)       input of the layer
    dA          (B, Co, Ho, Wo)     gradient of the loss with respect to its output
    matrix      (M, kh*kw)          rows: kept basis vectors of the kernel plane times their pre-gains; None = identity
    c           (B,)                clipping factors
    z_b         (Co, Ci/groups, M)  projected weight gradient of sample b
    T = Ho*Wo output positions,  K = kh*kw taps,  g = groups,  Cig = Ci/g,  Cog = Co/g

There are two exact strategies. `prefers_gram` chooses the cheaper one.
    materialise   `sample_gradients` forms every z_b for norms and sums. It keeps B * M * Co * Cig numbers in memory.
    Gram          `gram_squared_norms` needs only two T x T matrices per sample. `weighted_gradient` is then the native
                  weight gradient of the weighted batch, projected once. Nothing of size B * parameters is kept.

Padding means zero padding. For other kinds, pad x first and pass padding (0, 0). A Conv1d is a Conv2d of height 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from spectral_dp.gradients.norms import gram_matrices, rounded_up
from spectral_dp.gradients.sums import in_chunks, weigh
from spectral_dp.mechanism.clipping import underflow


class ConvGeometry(NamedTuple):
    """The hyper-parameters of a Conv2d, each as a pair (height, width)."""

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1


# ---------------------------------------------------------------------------------------------- materialise


def sample_gradients(x: Tensor, dA: Tensor, geometry: ConvGeometry, matrix: Tensor | None = None) -> Tensor:
    """Returns all z_b, as (B, g, M, Cig, Cog), in the order of operations that is cheaper."""
    if matrix is not None and filters_first(len(matrix), geometry, dA.shape[1]):
        return _products_of_filtered_inputs(x, dA, geometry, matrix)
    return _filtered_products(x, dA, geometry, matrix)


def filters_first(kept: int, geometry: ConvGeometry, c_out: int) -> bool:
    """Returns whether to filter the input with the M kept kernels, and not the products of its K taps.

    For each number of the input that is M K multiplications and then M products with Cog numbers, instead of K.
    """
    taps, c_out_group = geometry.kernel[0] * geometry.kernel[1], c_out // geometry.groups
    return kept * (TAP_COPY_PRICE * taps + c_out_group) < taps * c_out_group


def _products_of_filtered_inputs(x: Tensor, dA: Tensor, geometry: ConvGeometry, matrix: Tensor) -> Tensor:
    """Returns all z_b as products of M filtered inputs with dA: what is dropped is never computed."""
    groups, size, kept = geometry.groups, dA.shape[2:], len(matrix)
    batch, c_in_group, c_out_group = len(x), x.shape[1] // groups, dA.shape[1] // groups
    z = x.new_empty(batch, groups, kept, c_in_group, c_out_group)
    for rows in in_chunks(batch, (kept + matrix.shape[1]) * x.shape[1] * size.numel() + z[0].numel(), x):
        inner = _filtered_inputs(x[rows], size, geometry, matrix)
        outer = dA[rows].reshape(len(inner), c_out_group, -1)
        torch.bmm(inner, outer.mT, out=z[rows].view(len(inner), -1, c_out_group))
    return z


def _filtered_products(x: Tensor, dA: Tensor, geometry: ConvGeometry, matrix: Tensor | None) -> Tensor:
    """Returns all z_b as filtered products of K taps with dA.

    The kw horizontal shifts of the padded input are copied side by side once. Each kernel row is then a slice of
    that copy (a view if the vertical stride is 1), and one batched product (kw*Cig x T)(T x Cog) gives its kw taps.
    """
    (kh, kw), (sh, sw), _, (dh, dw), groups = geometry
    batch, c_out, h_out, w_out = dA.shape
    c_in_group, c_out_group = x.shape[1] // groups, c_out // groups
    row_span = (h_out - 1) * sh + 1
    in_work = kw * x.shape[1] * x.shape[2] * w_out + kh * kw * c_in_group * c_out

    z = x.new_empty(batch, groups, kh * kw if matrix is None else len(matrix), c_in_group, c_out_group)
    for rows in in_chunks(batch, in_work, x):
        padded = _pad(x[rows], geometry)
        n = len(padded)
        b, c, h, w = padded.stride()
        shifts = padded.as_strided(
            (n, groups, kw, c_in_group, padded.shape[2], w_out), (b, c * c_in_group, w * dw, c, h, w * sw)
        ).contiguous()
        outer = dA[rows].reshape(n * groups, c_out_group, -1).transpose(1, 2)
        taps = [
            torch.bmm(shifts[..., u * dh : u * dh + row_span : sh, :].reshape(n * groups, kw * c_in_group, -1), outer)
            for u in range(kh)
        ]
        out = z[rows].flatten(3)
        if matrix is None:
            torch.stack(taps, 1, out=out.view(n * groups, kh, kw * c_in_group, c_out_group))
        else:
            torch.matmul(matrix, torch.stack(taps, 1).view(n, groups, kh * kw, -1), out=out)
    return z


# ---------------------------------------------------------------------------------------------------- Gram


def gram_squared_norms(x: Tensor, dA: Tensor, geometry: ConvGeometry, matrix: Tensor | None = None) -> Tensor:
    """Returns squared norms (B,): ||z_b||^2 = <A_b, Q_b> with the T x T Gram matrices A of the taps and Q of dA."""
    groups = geometry.groups
    if matrix is not None and _preserves_norms(matrix):
        matrix = None
    by_shifts = matrix is None and geometry.stride == (1, 1)
    shifts = sum(geometry.kernel) if by_shifts else 0
    tap_numbers = geometry.kernel[0] * geometry.kernel[1] * x.shape[1] // groups
    positions = max(x.shape[2] * x.shape[3], dA.shape[2] * dA.shape[3])

    in_work = groups * 3 * positions**2 + (0 if by_shifts else 2 * groups * tap_numbers * positions)
    operator = None
    if matrix is not None and x.shape[2] * x.shape[3] <= SMALL_PLANE:
        operator = _filter_of_planes(x, dA.shape[2:], geometry, matrix)
    squared = []
    for rows in in_chunks(len(x), in_work, x):
        if by_shifts:
            tap_gram, dA_gram = _shifted_grams(x[rows], dA[rows], geometry)
        else:
            tap_gram, dA_gram = _filtered_grams(x[rows], dA[rows], geometry, matrix, operator)
        inner = torch.linalg.vecdot(tap_gram.flatten(1), dA_gram.flatten(1))
        taps, outer = (gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt() for gram in (tap_gram, dA_gram))
        inner = rounded_up(inner, taps, outer, tap_numbers, dA.shape[1] // groups, from_gram=True, added=shifts)
        squared.append(inner.view(-1, groups).sum(1))
    total = torch.cat(squared)
    return total if matrix is None else _with_leakage(total, x, dA, geometry, matrix)


def _with_leakage(squared: Tensor, x: Tensor, dA: Tensor, geometry: ConvGeometry, matrix: Tensor) -> Tensor:
    """Adds to the squared norms a bound on the rounding errors that pass the filter.

    These errors are ulps of the whole gradient, but the norm contains only its kept coordinates. If all power of a
    sample is in dropped coordinates, both its norm and its sum consist of rounding errors. The gradient is at most
    sqrt(K) |x| |dA| long, and pre-gains amplify its errors.
    """
    taps = geometry.kernel[0] * geometry.kernel[1]
    x_length, dA_length = (t.flatten(1).norm(dim=1) + underflow(t[0].numel(), t.dtype) for t in (x, dA))
    gain = torch.linalg.vector_norm(matrix, dim=1).amax().clamp(min=1)
    longest = gain * math.sqrt(taps) * x_length * dA_length
    return (squared.sqrt() + taps * torch.finfo(x.dtype).eps * longest).square()


def weighted_gradient(x: Tensor, dA: Tensor, c: Tensor, geometry: ConvGeometry, matrix: Tensor | None = None) -> Tensor:
    """Returns sum_b c_b z_b (Co, Cig, M): the native weight gradient with one operand weighted, then projected."""
    kernel, stride, padding, dilation, groups = geometry
    x, dA = weigh(x, dA, c)
    shape_only = x.new_empty(1).expand(dA.shape[1], x.shape[1] // groups, *kernel)
    total = torch.ops.aten.convolution_backward(
        dA, x, shape_only, None, stride, padding, dilation, False, (0, 0), groups, (False, True, False)
    )[1].flatten(2)
    return total if matrix is None else total @ matrix.T


def _shifted_grams(x: Tensor, dA: Tensor, geometry: ConvGeometry) -> tuple[Tensor, Tensor]:
    """Returns A and Q for stride 1 without a filter.

    Tap (u, v) of the output position (h, w) is the input at (h + u*dh - ph, w + v*dw - pw), or zero outside of the
    plane. So A is the Gram matrix of the input, summed over shifts of both its positions together: along the kernel's
    width, then along its height. The input is neither padded nor copied, whatever its order in memory.
    """
    (kh, kw), _, (ph, pw), (dh, dw), groups = geometry
    (height, width), (h_out, w_out) = x.shape[2:], dA.shape[2:]
    inner, outer = (t.reshape(len(t) * groups, t.shape[1] // groups, -1).mT for t in (x, dA))
    gram = gram_matrices(inner).view(-1, height, width, height, width)
    gram = _sum_of_shifts(gram, 2, w_out, kw, dw, pw)
    gram = _sum_of_shifts(gram, 1, h_out, kh, dh, ph)
    return gram.view(-1, h_out * w_out, h_out * w_out), gram_matrices(outer)


def _sum_of_shifts(gram: Tensor, dim: int, size: int, count: int, step: int, padding: int) -> Tensor:
    """Returns sum_k gram[t + k*step - padding, t' + k*step - padding], k < count, for t, t' < size.

    The positions t and t' are in the dimensions `dim` and `dim + 2`. Outside of the plane there are zeros.
    """
    if count == 1 and not padding:
        return gram
    shape = list(gram.shape)
    shape[dim] = shape[dim + 2] = size
    total = gram.new_zeros(shape)
    for k in range(count):
        shift = k * step - padding
        start = max(0, -shift)
        length = min(size, gram.shape[dim] - shift) - start
        if length > 0:
            to, shifted = (
                t.narrow(dim, first, length).narrow(dim + 2, first, length)
                for t, first in ((total, start), (gram, start + shift))
            )
            to += shifted
    return total


def _filtered_grams(
    x: Tensor, dA: Tensor, geometry: ConvGeometry, matrix: Tensor | None, operator: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns A and Q for any stride and filter. A is a sum over the M filtered inputs, in any order."""
    outer = dA.reshape(len(dA) * geometry.groups, dA.shape[1] // geometry.groups, -1)
    if operator is None:
        inner = _filtered_inputs(x, dA.shape[2:], geometry, matrix)
    else:
        inner = (x.flatten(2) @ operator).view(len(outer), -1, outer.shape[2])
    return gram_matrices(inner.mT), gram_matrices(outer.mT)


def _filter_of_planes(x: Tensor, size: torch.Size, geometry: ConvGeometry, matrix: Tensor) -> Tensor:
    """Returns the filter as a matrix (H*W, M*T) that acts on whole planes: quicker than taps where planes are small."""
    height, width = x.shape[2:]
    planes = torch.eye(height * width, dtype=x.dtype, device=x.device).view(-1, 1, height, width)
    return _filtered_inputs(planes, size, geometry._replace(groups=1), matrix).flatten(1)


def _preserves_norms(matrix: Tensor) -> bool:
    """Returns whether P^T P = I up to rounding. Then P does not change any norm, and can be left out."""
    if matrix.shape[0] < matrix.shape[1]:
        return False
    gram = matrix.T @ matrix
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return bool((gram - eye).abs().max() < 16 * torch.finfo(gram.dtype).eps)


# -------------------------------------------------------------------------------------------------- shared


def _filtered_inputs(x: Tensor, size: torch.Size, geometry: ConvGeometry, matrix: Tensor | None) -> Tensor:
    """Returns x correlated with each row of the matrix, (n*g, M*Cig, T); without a matrix its taps, M = K.

    One copy of the taps and one product are two to three times quicker than depthwise convolutions.
    """
    (kh, kw), (sh, sw), _, (dh, dw), groups = geometry
    padded, c_in_group = _pad(x, geometry), x.shape[1] // groups
    b, c, h, w = padded.stride()
    taps = padded.as_strided(
        (len(x), groups, kh, kw, c_in_group, *size), (b, c * c_in_group, h * dh, w * dw, c, h * sh, w * sw)
    ).reshape(len(x) * groups, kh * kw, -1)
    inner = taps if matrix is None else matrix @ taps
    return inner.reshape(len(inner), -1, size.numel())


def _pad(x: Tensor, geometry: ConvGeometry) -> Tensor:
    """Returns the padded input with channels before positions in memory, so that taps are copied in long runs.

    Channels-last input is rearranged by the copy that pads it.
    """
    ph, pw = geometry.padding
    if not (ph or pw):
        return x.contiguous()
    if x.is_contiguous():
        return F.pad(x, (pw, pw, ph, ph))
    height, width = x.shape[2:]
    padded = x.new_zeros(*x.shape[:2], height + 2 * ph, width + 2 * pw)
    padded[..., ph : ph + height, pw : pw + width] = x
    return padded


# ----------------------------------------------------------------------------------------------- cost rule

# Prices in multiply-adds of a matrix product (0.02 ns each when measured: float32, two AVX2 cores, batch 256).
TAP_PRICE = 50  # per number of the unprojected per-sample gradient: written, stacked, projected, squared
CACHE_PRICE = 50  # per cached number of z_b: first touch of its memory, reread by the clipped sum (20 to 150)
HELD_PRICE = 125  # per kept number of z_b that comes from filtered inputs: half of it is time, half the memory it holds
GRAM_PRICE = 200  # per entry of a Gram matrix: shifted sums and inner product
FILTER_PRICE = 60  # per number of a filtered or shifted input
TAP_COPY_PRICE = 1.5  # per multiplication of a filter, with the copy of the taps that it needs
SMALL_PLANE = 49  # numbers of a plane up to which its filter is one matrix: two to three times quicker than taps


def prefers_gram(
    input_shape: Sequence[int],
    output_shape: Sequence[int],
    geometry: ConvGeometry,
    kept: int | None = None,
) -> bool:
    """Returns whether norm and clipped sum of a (Ci, H, W) -> (Co, Ho, Wo) layer are cheaper by Gram matrices.

    The input is without its zero padding, which costs Gram matrices nothing. `kept` is M, or None without a filter.
    Each strategy computes the K*Cig*Co*T multiply-adds of the weight gradient once (materialise for the norm, Gram for
    the clipped sum), so they cancel, except that materialise computes only those of M if it filters first. What
    remains, per sample: materialise handles K*Cig*Co numbers and keeps M*Cig*Co; Gram computes and combines its
    matrices of positions, N x N over the input if shifts are possible, or else T x T, summed over M filtered inputs.
    """
    (kh, kw), stride, _, _, groups = geometry
    (c_in, height, width), (c_out, h_out, w_out) = input_shape, output_shape
    taps = kh * kw
    kept = taps if kept is None else kept
    filtered = kept < taps
    weights = c_in // groups * c_out
    positions = h_out * w_out
    if filtered and filters_first(kept, geometry, c_out):
        dropped = (taps - kept) * weights * positions  # multiplications that only the native sum does
        materialise = weights * HELD_PRICE * kept + FILTER_PRICE * kept * c_in * positions - dropped
    else:
        materialise = weights * (TAP_PRICE * taps + CACHE_PRICE * kept)

    if filtered or stride != (1, 1):
        gram = (kept * c_in + c_out) * positions**2 + FILTER_PRICE * kept * c_in * positions
    else:
        n_in = height * width
        gram = c_in * n_in**2 + c_out * positions**2 + GRAM_PRICE * groups * max(n_in, positions) ** 2
    return gram < materialise


def explicitly_padded(module: nn.Conv1d | nn.Conv2d, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Returns the input and its zero padding. Padding of other kinds is applied to the input, and is then zero."""
    check_batched(module, x)
    if (padding := zero_padding(module)) is not None:
        return x, padding
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0,) * len(module.kernel_size)


def zero_padding(module: nn.Conv1d | nn.Conv2d) -> tuple[int, ...] | None:
    """Returns how many zeros are added at both ends of each dimension, or None if padding is of another kind."""
    return None if isinstance(module.padding, str) or module.padding_mode != "zeros" else tuple(module.padding)


def padded_size(module: nn.Conv1d | nn.Conv2d, size: Sequence[int]) -> tuple[int, ...]:
    """Returns the size of the input's plane after all padding of the layer."""
    before_after = module._reversed_padding_repeated_twice[::-1]
    return tuple(n + before_after[2 * i] + before_after[2 * i + 1] for i, n in enumerate(size))


def check_batched(module: _ConvNd, x: Tensor) -> None:
    """Raises ``ValueError`` if the input has no dimension for samples, although torch allows that."""
    if x.ndim != len(module.kernel_size) + 2:
        raise ValueError(f"{type(module).__name__} was called with one unbatched sample {tuple(x.shape)}: add x[None]")
