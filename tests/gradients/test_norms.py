"""Norms of sums of outer products: exact for ordinary samples, and never below what is clipped by them."""

import math

import pytest
import torch
from torch import nn

from spectral_dp.gradients import norms
from spectral_dp.gradients.model import ModelGradients
from spectral_dp.gradients.norms import (
    _gram_norms,
    _lengths,
    bias_norms,
    gram_matrices,
    outer_norms,
    rounded_up,
    squares,
    token_norms,
    transform_error,
)
from spectral_dp.mechanism.clipping import ROUNDING_GUARD, FlatClipping

# (T, n, m): one token, few long tokens (through the Gram matrices), many short ones (through the gradient itself).
SHAPES = [(1, 5, 4), (2, 40, 30), (50, 3, 4)]


def sums_of_outer_products(x, dA):
    return torch.einsum("btm,btn->bmn", dA.conj(), x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_token_norms_are_those_of_the_sum(shape, dtype):
    """The sum of the tokens' norms is another number: the control below."""
    tokens, n, m = shape
    x, dA = torch.randn(6, tokens, n, dtype=dtype), torch.randn(6, tokens, m, dtype=dtype)
    exact = sums_of_outer_products(x, dA).flatten(1).norm(dim=1).square()
    torch.testing.assert_close(token_norms(x, dA), exact, rtol=1e-10, atol=0)
    if tokens > 1:
        added = (squares(x).sum(2) * squares(dA).sum(2)).sum(1)
        assert float(((added - exact).abs() / exact).max()) > 0.01


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_token_norms_of_what_cancels_cover_the_rounding_errors_of_the_sum(shape):
    tokens, n, m = shape
    x = torch.randn(1, 1, n).expand(1, tokens, n) * 1e4
    dA = torch.randn(1, 1, m) * torch.tensor([1.0, -1.0]).repeat(tokens // 2).view(1, tokens, 1)
    length = float((x.norm(dim=2) * dA.norm(dim=2)).sum())
    least = tokens * torch.finfo(torch.float32).eps * length
    assert least <= float(token_norms(x, dA).sqrt()) < 1e-2 * length


def test_token_norms_count_errors_of_the_input():
    x, dA = torch.ones(2, 1, 4), torch.ones(2, 1, 9)
    clean, erring = (token_norms(x, dA, errors).sqrt() for errors in (None, torch.tensor([[0.5], [0.0]])))
    torch.testing.assert_close(erring - clean, torch.tensor([1.5, 0.0], dtype=torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("n", [0, 1, norms.LONG, norms.LONG + 1, 3 * norms.LONG])
def test_lengths_in_pieces_are_those_of_the_whole(n, dtype):
    """Also of rows with gaps between them, and of no samples at all."""
    t = torch.randn(5, 3, n + 2, dtype=dtype)[..., 1:-1]
    torch.testing.assert_close(_lengths(t), t.abs().square().sum(2).sqrt())
    assert _lengths(t[:0]).shape == (0, 3)


def hostile(n, piece=256):
    """A row whose squares, added one after the other in float32, are all lost but the first of every piece."""
    row = torch.full((n,), 0.999 * 2**-12)
    row[::piece] = 1.0
    return row


def most_lost(n, *, strided=False):
    """How much shorter lengths come out in float32, relatively: rows of one number, and rows made to lose the most."""
    rows = [*torch.linspace(1, 2, 200)[:, None].expand(-1, n), *(hostile(n, piece) for piece in (128, 512, n))]
    values = torch.stack(rows)[:, None]
    exact = values.double().square().sum(2).sqrt()
    given = values.mT.contiguous().mT if strided else values  # (B, 1, n) with a stride of 1 in the middle only
    given = torch.stack([given, given], dim=3)[..., 0] if strided else given
    assert (given.stride(2) == 1) != strided
    return float((1 - _lengths(given).double() / exact).max())


@pytest.mark.parametrize("n", [1000, 1024, 100_000])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_lose_less_than_the_rounding_guard(n, strided):
    """Two lengths are multiplied. A layer that reads the last of several positions has numbers that lie apart."""
    assert most_lost(n, strided=strided) < 0.45 * ROUNDING_GUARD


def test_negative_control_rows_in_one_go_lose_more(monkeypatch):
    monkeypatch.setattr(norms, "LONG", 100_000)
    assert most_lost(100_000) > ROUNDING_GUARD


def lost_by_gram_matrices(tokens):
    t = hostile(2048, 2048).expand(3, tokens, -1)
    return float((1 - gram_matrices(t).double() / t.double().square().sum(2, keepdim=True)).max())


def test_gram_matrices_of_few_tokens_lose_less_than_the_rounding_guard(monkeypatch):
    """Products of small matrices add one after the other, so a piece of 256 channels loses too much of a square."""
    assert max(lost_by_gram_matrices(tokens) for tokens in range(1, 10)) < ROUNDING_GUARD
    monkeypatch.setattr(norms, "PIECE", 2048)
    assert max(lost_by_gram_matrices(tokens) for tokens in range(1, 10)) > 5 * ROUNDING_GUARD, "the control"


class _LastPosition(nn.Module):
    """A layer that reads the last of several positions, whose numbers lie apart."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.unsqueeze(2).expand(-1, -1, 3).contiguous()[:, :, -1])


def _plane(*shape):
    """One position of a map with the hostile row over channels, and zeros elsewhere."""
    x = torch.zeros(shape)
    x[(slice(None), slice(None), *[0] * (len(shape) - 2))] = hostile(shape[1], shape[1])
    return x


def _long_plane(channels, length):
    x = torch.zeros(1, channels, length)
    x[:, 0] = hostile(length, length)
    return x


_HOSTILE = {
    "dense, apart": (_LastPosition(nn.Linear(1024, 1024, bias=False)), hostile(1024, 1024)[None], (1, 1024)),
    "dense with bias, apart": (_LastPosition(nn.Linear(1024, 1024)), hostile(1024, 1024)[None], (1, 1024)),
    "bias alone": (nn.Linear(8, 1000).requires_grad_(False), torch.zeros(1, 8), (1, 1000)),
    "layer norm": (nn.LayerNorm(512), torch.randn(1, 512), (1, 512)),
    "few positions": (nn.Conv2d(256, 256, 3, padding=1, bias=False), _plane(1, 256, 2, 2), (1, 256, 2, 2)),
    "one position": (nn.Conv2d(512, 256, 1, bias=False), _plane(1, 512, 1, 1), (1, 256, 1, 1)),
    "long kernel": (nn.Conv1d(64, 64, 1000, bias=False), _long_plane(64, 1000), (1, 64, 1)),
}


@pytest.mark.parametrize(("layer", "x", "shape"), _HOSTILE.values(), ids=_HOSTILE)
@pytest.mark.parametrize("apart", [False, True])
def test_no_hostile_record_contributes_more_than_the_bound(layer, x, shape, apart):
    """Numbers that float32 loses one by one: each of these exceeded the bound by 4e-6 to 5e-5 of it at some time."""
    if not any(p.requires_grad for p in layer.parameters()):
        layer.bias.requires_grad_()
    gradients = ModelGradients(layer)
    y = layer(x.clone().requires_grad_())
    dA = 128 * _plane(*shape) if len(shape) > 2 else 128 * hostile(shape[1], shape[1])[None]
    if apart:
        dA = torch.stack([dA, dA], dim=-1)[..., 0]
    y.backward(dA)
    batch = gradients.take()
    sums = batch.clipped_sums(FlatClipping(1.0).factors(batch.squared_norms()))
    assert math.sqrt(sum(float(each.double().square().sum()) for each in sums.values())) <= 1.0


def test_norms_are_rounded_up_by_no_more_than_is_needed():
    """Of an ordinary sample the guard is not noticeable; a norm that came out negative counts as none."""
    lengths = torch.rand(3, 4) + 1
    squared = torch.tensor([2.0, 5.0, -1e-9])
    up = rounded_up(squared, lengths, lengths, 8, 8, from_gram=False)
    assert up.dtype == torch.float64
    assert bool((up >= squared.clamp(min=0)).all())
    torch.testing.assert_close(up[:2], squared[:2].double(), rtol=1e-4, atol=0)
    assert bool((rounded_up(squared, lengths, lengths, 8, 8, from_gram=True) > up).all())


@pytest.mark.parametrize("n", [3, norms.PIECE, 2 * norms.PIECE + 1])
def test_gram_matrices_in_pieces_are_those_of_the_whole(n):
    t = torch.randn(2, 3, n, dtype=torch.complex128)
    torch.testing.assert_close(gram_matrices(t), torch.einsum("bsn,btn->bst", t, t.conj()))


def test_outer_norms_hide_no_product_whose_factor_underflows():
    """The squares of 400 numbers of 1e-23 are zero in float32; times 1e18 they are a gradient."""
    x, dA = torch.full((1, 4), 1e18), torch.full((1, 400), 1e-23)
    lengths = [squares(t).sum(1).sqrt() for t in (x, dA)]
    exact = float(x.double().norm() * dA.double().norm())
    assert float(lengths[0] * lengths[1]) == 0 < exact
    assert float(outer_norms(*lengths, 4, 400)) >= exact


def test_bias_norms_are_those_of_the_sum_over_tokens():
    dA = torch.randn(5, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(bias_norms(dA), dA.sum(1).square().sum(1))
    torch.testing.assert_close(bias_norms(dA[:, :1]), dA[:, 0].square().sum(1))


def test_bias_norms_of_what_cancels_cover_another_order_of_the_sum():
    """Same numbers, another order: nothing in common but the size of their rounding errors."""
    dA = torch.randn(64, 3) * 1e8
    dA = torch.cat([dA, -dA])
    norm = float(bias_norms(dA[None]).sqrt())
    for seed in range(20):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(seed))
        total = torch.zeros(3)
        for row in dA[order]:
            total += row
        assert float(total.norm()) <= norm


@pytest.mark.parametrize("n", [16, 1000, 4096])
def test_two_ways_to_transform_differ_by_less_than_is_said(n):
    x = torch.randn(n) * 1e3
    fast = torch.view_as_real(torch.fft.fft(x, norm="ortho"))
    angles = torch.outer(torch.arange(n), torch.arange(n)).remainder(n) * (2 * torch.pi / n)
    slow = torch.stack([angles.cos() @ x, -angles.sin() @ x], dim=1) / n**0.5
    assert float((fast - slow).norm()) <= transform_error(n, x.dtype) * float(x.norm())
    assert transform_error(n, torch.float64) < 1e-8 * transform_error(n, x.dtype)


@pytest.mark.parametrize("tokens", [2, 3, 6, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_halves_of_gram_matrices_are_the_whole(tokens, dtype):
    """Catches an odd token that is left out, pairs that count once, and a conjugate that is forgotten."""
    x, dA = (torch.randn(3, tokens, n, dtype=dtype) for n in (40, 50))
    squared, x_lengths, dA_lengths = _gram_norms(x, dA)
    exact = torch.einsum("btm,btn->bmn", dA.conj(), x).abs().square().sum((1, 2))
    torch.testing.assert_close(squared, exact)
    torch.testing.assert_close(x_lengths, x.abs().square().sum(2).sqrt())
    torch.testing.assert_close(dA_lengths, dA.abs().square().sum(2).sqrt())
