"""Small models in which samples share what is computed once: positions, tokens, gates; and folded rows."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Sharing(nn.Module):
    """What the models below use: layers, and parameters that the module holds itself; the input is ``(B, T, 6)``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out, self.norm = nn.Linear(6, 6), nn.Linear(6, 2), nn.LayerNorm(6)
        self.positions, self.pairs, self.kernel = nn.Embedding(8, 6), nn.Embedding(4, 2), nn.Conv1d(6, 6, 1)
        self.gate, self.matrix = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 6))
        self.token, self.table = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(8, 6))


def one_row_of_positions(m: Sharing, x: Tensor) -> Tensor:
    return m.out(torch.tanh(x + m.positions(torch.arange(x.shape[1])[None])))


def positions_without_a_row(m: Sharing, x: Tensor) -> Tensor:
    return m.out(torch.tanh(x + m.positions(torch.arange(x.shape[1]))))


def pairs_of_positions(m: Sharing, x: Tensor) -> Tensor:
    t = torch.arange(x.shape[1])
    bias = m.pairs((t[:, None] - t).abs().clamp(max=3)).permute(2, 0, 1).unsqueeze(0)
    scores = torch.stack([x @ x.mT, m.layer(x) @ x.mT], 1)
    scores += bias
    return m.out(torch.tanh(scores.softmax(-1).sum(1) @ x))


def pairs_as_a_mask(m: Sharing, x: Tensor) -> Tensor:
    t = torch.arange(x.shape[1])
    bias = m.pairs((t[:, None] - t).abs().clamp(max=3)).permute(2, 0, 1)[None]
    heads = m.layer(x).unflatten(2, (2, 3)).transpose(1, 2)
    return m.out(F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias).transpose(1, 2).flatten(2))


def tokens_and_positions(m: Sharing, x: Tensor) -> Tensor:
    ids = (x[..., 0] > 0).long()
    return m.out(torch.tanh(x + m.positions(ids) + m.positions(torch.arange(x.shape[1]))))


def layers_on_what_is_shared(m: Sharing, x: Tensor) -> Tensor:
    grid = torch.linspace(0, 1, 6 * x.shape[1], dtype=x.dtype).view(x.shape[1], 6)
    return m.out(torch.tanh(x + m.norm(m.layer(torch.relu(m.layer(grid))))))


def convolution_of_what_is_shared(m: Sharing, x: Tensor) -> Tensor:
    grid = torch.linspace(0, 1, 6 * x.shape[1], dtype=x.dtype).view(1, 6, x.shape[1])
    return m.out(torch.tanh(x + m.kernel(grid).mT))


def class_token(m: Sharing, x: Tensor) -> Tensor:
    x = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.table[: x.shape[1] + 1]
    return m.out(torch.tanh(m.layer(x)))


def repeated_token(m: Sharing, x: Tensor) -> Tensor:
    return m.out(torch.tanh(torch.cat([m.token.repeat(x.shape[0], 2, 1), x], dim=1)))


def scaled(m: Sharing, x: Tensor) -> Tensor:
    return m.out(torch.sigmoid(m.gate) * m.layer(x) + (1 - torch.sigmoid(m.gate)) * x)


def scaled_in_place(m: Sharing, x: Tensor) -> Tensor:
    h = m.layer(x)
    h *= m.gate
    h += m.table[: x.shape[1]]
    return m.out(torch.tanh(h))


def matrices(m: Sharing, x: Tensor) -> Tensor:
    h = torch.einsum("bti,ij->btj", x @ m.matrix, m.matrix)
    return m.out(torch.tanh(F.linear(h, m.matrix, m.gate)))


def kernel(m: Sharing, x: Tensor) -> Tensor:
    return m.out(torch.tanh(F.conv1d(x.mT, m.matrix[:, :, None], m.gate).mT))


def chosen_rows(m: Sharing, x: Tensor) -> Tensor:
    ids = (x[..., 0] > 0).long()
    return m.out(torch.tanh(torch.where(ids[..., None] > 0, m.table[ids], F.embedding(ids, m.table) * m.gate)))


def folded(m: Sharing, x: Tensor) -> Tensor:
    rows = torch.tanh(m.layer(x)).flatten(0, 1)
    rows = m.norm(rows) * m.gate + m.kernel(rows[..., None])[..., 0]
    return m.out(rows).unflatten(0, x.shape[:2])


def interleaved_input(m: Sharing, x: Tensor) -> Tensor:
    return m.out(m.layer(x.transpose(0, 1).reshape(-1, 6))).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def interleaved_inside(m: Sharing, x: Tensor) -> Tensor:
    rows = torch.tanh(m.layer(x)).transpose(0, 1).reshape(-1, 6)
    return m.out(rows[:, None, :] @ m.matrix.detach())[:, 0].unflatten(0, (x.shape[1], -1)).transpose(0, 1)


def interleaved_beside_a_parameter(m: Sharing, x: Tensor) -> Tensor:
    rows = x.transpose(0, 1).reshape(-1, 6) * m.gate
    return m.out(rows.unflatten(0, (x.shape[1], -1)).transpose(0, 1))


def samples_in_the_second_dimension(m: Sharing, x: Tensor) -> Tensor:
    return m.out((x.transpose(0, 1) + m.table[: x.shape[1], None]).transpose(0, 1))


def samples_that_meet(m: Sharing, x: Tensor) -> Tensor:
    return m.out(x * m.gate - (x * m.gate).mean(0))


def written_into(m: Sharing, x: Tensor) -> Tensor:
    h = m.layer(x)
    h[:, 0] = m.gate
    return m.out(h)


def changed_in_place(m: Sharing, x: Tensor) -> Tensor:
    return m.out(x + (m.gate * 1).add_(1))


EXACT = {
    f.__name__.replace("_", " "): f
    for f in (
        one_row_of_positions, positions_without_a_row, pairs_of_positions, pairs_as_a_mask, tokens_and_positions,
        layers_on_what_is_shared, convolution_of_what_is_shared, class_token, repeated_token, scaled, scaled_in_place,
        matrices, kernel, chosen_rows, folded,
    )
}  # fmt: skip
_REFUSED = {
    interleaved_input: "cannot be told apart",
    interleaved_inside: "cannot be told apart",
    interleaved_beside_a_parameter: "cannot tell how the samples",
    samples_in_the_second_dimension: "cannot tell how the samples",
    samples_that_meet: "samples mix",
    written_into: "cannot tell how the samples",
    changed_in_place: "in place",
}
REFUSED = {f.__name__.replace("_", " "): words for f, words in _REFUSED.items()}
_ALL = EXACT | {f.__name__.replace("_", " "): f for f in _REFUSED}


def make(name: str) -> Sharing:
    """The model of this name, in float64."""
    return type("Model", (Sharing,), {"forward": _ALL[name]})().double()
