"""The rule of block-circulant layers (Algorithm 3 of the paper): norms and sums without per-sample gradients.

Letters are those of ``layers.py``, and

    B, T   samples, tokens of each      X, D   (q,), (p,) for each frequency f: orthonormal DFT of the blocks of x, dA
    a_f    pre-gain of a frequency      w_f    how many real coordinates it has: 1 for DC and Nyquist, 2 for the others

    G_b(f)         = √d Σ_t conj(D_bt(f)) X_bt(f)^t                        rank one per frequency and token
    ||z_b||²       = d Σ_f w_f a_f² ||Σ_t conj(D_bt(f)) X_bt(f)^t||²       for one token a product of two norms
    Σ_b c_b z_b(f) = √d a_f Σ_bt c_b conj(D_bt(f)) X_bt(f)^t               one matrix product per kept frequency

With many tokens, the per-sample gradients are smaller than their tokens, or not much larger. Then they are formed once,
a few samples at a time, and norm and sum are computed from them.

Norm and sum may use different frequencies: in the paper's order (clip, then filter), the norm counts frequencies that
the sum drops. Frequencies that neither uses are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from spectral_dp.gradients.norms import squares, token_norms
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import register_rule
from spectral_dp.gradients.rules.rule import WeightAndBiasRule
from spectral_dp.gradients.sums import as_tokens, in_chunks, merge_tokens, weigh
from spectral_dp.layers import SHORT_BLOCK, BlockCirculantLinear, FrequencyBand, bilinear, on_blocks, to_blocks
from spectral_dp.mechanism.clipping import underflow
from spectral_dp.mechanism.gains import Gains
from spectral_dp.mechanism.transforms import TransformName


@register_rule(BlockCirculantLinear, parameters=["weight", "bias"])
class BlockCirculantRule(WeightAndBiasRule[BlockCirculantLinear]):
    """The rule of :class:`~spectral_dp.layers.BlockCirculantLinear`. ``weight`` coefficients are ``(p, q, M)``."""

    default_transform: ClassVar[TransformName] = "fourier"

    #: The gains for which :meth:`begin_step` prepared the frequencies, after a check; None before.
    _prepared: tuple[Gains | None] | None = None

    def __init__(self, module: BlockCirculantLinear, config: LayerConfig) -> None:
        if config.transform not in (None, "fourier"):
            known = f"a block-circulant layer is diagonal in the Fourier basis, not in that of {config.transform!r}"
            raise ValueError(f"{known}: leave the transform out for this layer")
        super().__init__(module, config)

    @property
    def adds_up_positions(self) -> bool:
        return True

    def coordinate_shape(self) -> tuple[int, ...]:
        return (self.module.block_size,)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self._prepared == (self.gains,):
            return
        self._prepared = None
        d = self.module.block_size
        pre = torch.ones(d).double() if self.gains is None else self.gains.pre.double()
        a = pre[[max(2 * f - 1, 0) for f in range(d // 2 + 1)]]
        if not torch.equal(pre, a[[(i + 1) // 2 for i in range(d)]]):
            raise ValueError(
                f"norms of a block-circulant layer are computed per frequency, but the pre-gains {pre.tolist()} tell "
                "cosine and sine of a frequency apart: average each pair (post-gains may differ)"
            )
        index = range(d) if self.gains is None else self.gains.index.tolist()
        self._kept = FrequencyBand.of(d, sorted({(i + 1) // 2 for i in index}))
        self._counted = _, singles, pairs = FrequencyBand.of(d, a.nonzero().flatten().tolist())
        w = torch.tensor([1] * len(singles) + [2] * len(pairs))
        self._norm_weights = d * w * a[[*singles, *pairs]].square()
        self._prepared = (self.gains,)

    def merge(self, uses: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return merge_tokens(uses)

    def weight_norms(self, x: Tensor, dA: Tensor) -> Tensor:
        powers = self._powers(self.positions(x), self.positions(dA))
        return powers @ self._norm_weights.to(powers)

    def weight_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> Tensor:
        x, dA = self.positions(x), self.positions(dA)
        blocks, c_token = self._blocks(x, dA), c.repeat_interleave(dA.shape[1])
        if self.module.block_size <= SHORT_BLOCK:
            return _short_sum(self._kept, *blocks, c_token, self.matrix(dA))
        total = _long_sum(self._kept, *blocks, c_token)
        return total if self.projection is None else self.projection.analyse(total)

    def forms(self, x: Tensor, dA: Tensor) -> bool:
        """Returns whether there are so many tokens that forming the per-sample gradients is faster and not much larger.

        The prices were measured (two cores, float32), in multiplications. Each number of a formed gradient costs ``T``
        multiplications and 40 to store it. Without forming, each number that is transformed costs 360, and 5 for every
        token in the Gram matrices.
        """
        if not self.trains("weight"):
            return True  # a bias alone is smaller than dA
        (_, T, m), (p, q, d) = as_tokens(dA).shape, self.module.weight.shape
        numbers = T * (q * d + m)
        if T == 1 or d > SHORT_BLOCK or p * q * d > 2 * numbers:
            return False
        products = (len(self._counted.singles) + 3 * len(self._counted.pairs)) * p * q
        return products * (T + 40) < numbers * (360 + 5 * T)

    def form_weight(self, x: Tensor, dA: Tensor) -> Tensor:
        return self._coordinates(self.positions(x), self.positions(dA)).movedim(1, -1)  # (B, p, q, M)

    def _coordinates(self, x: Tensor, dA: Tensor) -> Tensor:
        """Returns the counted coordinates ``(B, M, p, q)``, as combinations of ``R`` products of the transforms."""
        (B, T, _), (p, q, _) = dA.shape, self.module.weight.shape
        A, V, C = bilinear(self._counted, dA.dtype, dA.device)
        combine, R = _onto(self.matrix(dA, counted=True), V), len(A)
        z = dA.new_empty(B, len(combine), p * q)
        for rows in in_chunks(B, R * (T * (p + q) + p * q), dA):
            X, D = self._blocks(x[rows], dA[rows])
            X, D = (t.unflatten(0, (-1, T)) for t in (on_blocks(A, X), on_blocks(C, D)))  # (n, T, R, q), (n, T, R, p)
            products = D.permute(0, 2, 3, 1).flatten(0, 1) @ X.transpose(1, 2).flatten(0, 1)  # (n R, p, q)
            torch.matmul(combine, products.view(-1, R, p * q), out=z[rows])
        return z.unflatten(2, (p, q))

    def _powers(self, x: Tensor, dA: Tensor) -> Tensor:
        """Returns ``||Σ_t conj(D_bt(f)) X_bt(f)^t||²`` of every counted frequency, ``(B, F)``, rounded up.

        Formal guarantee. No sample is clipped too little because of rounding. If the tokens of a sample cancel, or its
        power is in dropped frequencies, norm and sum consist of different rounding errors. A bound on these errors is
        added to the norm.
        """
        (B, T, _), band, blocks = dA.shape, self._counted, self._blocks(x, dA)
        (x, x_most), (dA, dA_most) = (_lengths(t, band) for t in blocks)
        length, most = ((a * b).unflatten(0, (B, T)).sum(1) for a, b in ((x, dA), (x_most, dA_most)))
        if T == 1:
            return most.double().square()
        X, D = (_spectrum(t, band).unflatten(0, (B, T)).permute(3, 0, 1, 2) for t in blocks)
        norms = token_norms(X.flatten(0, 1), D.flatten(0, 1)).clamp(min=0).sqrt().view(X.shape[:2]).T
        return (norms + most * (1 + T * torch.finfo(dA.dtype).eps) - length).square()

    def positions(self, dA: Tensor) -> Tensor:
        return as_tokens(dA.to(self.dtype))

    def _blocks(self, x: Tensor, dA: Tensor) -> tuple[Tensor, Tensor]:  # (B, T, n) -> (B T, ceil(n / d), d) each
        d = self.module.block_size
        return to_blocks(x.flatten(0, 1), d), to_blocks(dA.flatten(0, 1), d)


def _lengths(blocks: Tensor, band: FrequencyBand) -> tuple[Tensor, Tensor]:
    """Returns ``||X(f)||``, ``(N, F)``, and the same plus a bound on its rounding error."""
    if band.d <= SHORT_BLOCK:
        ones, twos = len(band.singles), len(band.pairs)
        coordinates = bilinear(band, blocks.dtype, blocks.device)[0][: ones + 2 * twos]
        single, c, s = squares(on_blocks(coordinates, blocks)).sum(2).sqrt().split([ones, twos, twos], dim=1)
        lengths = torch.cat([single, torch.hypot(c, s) / math.sqrt(2)], dim=1)  # c and s are √2 (Re, Im)
    else:
        lengths = squares(_spectrum(blocks, band)).sum(1).sqrt()
    error = 2 * band.d * torch.finfo(blocks.dtype).eps  # d ulps for the norm, and d for the sum
    lost = underflow(blocks.shape[1] * blocks.shape[2], blocks.dtype)
    return lengths, lengths + error * torch.linalg.vector_norm(blocks, dim=(1, 2))[:, None] + lost


def _onto(matrix: Tensor | None, V: Tensor) -> Tensor:
    """Returns the matrix ``(M, R)`` from the ``R`` products of a pair of blocks to the coordinates of its gradient."""
    return V.T if matrix is None else matrix @ V.T


def _short_sum(band: FrequencyBand, x: Tensor, dA: Tensor, c: Tensor, matrix: Tensor | None) -> Tensor:
    """Returns the coordinates ``(p, q, M)`` of ``Σ_n c_n g_n``: the projection of ``V^t Σ_n c_n (C dA_n) (A x_n)``."""
    A, V, C = bilinear(band, dA.dtype, dA.device)
    x, dA = weigh(on_blocks(A, x), on_blocks(C, dA), c)
    products = torch.bmm(dA.permute(1, 2, 0), x.transpose(0, 1))  # (R, p, q)
    return (products.flatten(1).T @ _onto(matrix, V).T).unflatten(0, products.shape[1:])


def _long_sum(band: FrequencyBand, x: Tensor, dA: Tensor, c: Tensor) -> Tensor:
    X, D = weigh(_spectrum(x, band), _spectrum(dA, band), c)
    products = torch.bmm(D.permute(2, 1, 0).conj_physical(), X.permute(2, 0, 1))  # (F, p, q)
    G = products.new_zeros(*products.shape[1:], band.d // 2 + 1)
    G[..., band.singles + band.pairs] = products.permute(1, 2, 0)
    return torch.fft.irfft(G, n=band.d, norm="forward")  # √d, and the orthonormal inverse


def _spectrum(blocks: Tensor, band: FrequencyBand) -> Tensor:
    """Returns the complex spectrum of each block at the frequencies of the band, ``(N, n, d) -> (N, n, F)``."""
    if not len(blocks):  # MKL cannot transform an empty batch
        return _spectrum(blocks.new_zeros(1, *blocks.shape[1:]), band)[:0]
    return torch.fft.rfft(blocks, norm="ortho")[..., band.singles + band.pairs]
