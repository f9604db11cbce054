"""What the table of supported models is made of, first part: the kinds of layer of ``torch.nn``, each with an input."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations

from spectral_dp.layers import BlockCirculantLinear

WIDTH, STEPS, WORDS, CHANNELS = 64, 32, 200, 8


class Entry(NamedTuple):
    """A model and what to call it with.

    Attributes:
        name: What the table calls it.
        make: Makes the model.
        inputs: Makes the keyword arguments of a batch of so many samples, or one tensor.
        output: Takes the tensor that the loss depends on out of what the model returns.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    output: Callable[[Any], torch.Tensor] = lambda out: out


def _rows(n):
    return torch.randn(n, WIDTH)


def _tokens(n):
    return torch.randn(n, STEPS, WIDTH)


def _images(n):
    return torch.randn(n, CHANNELS, 16, 16)


def _sequences(n):
    return torch.randn(n, CHANNELS, 64)


def _volumes(n):
    return torch.randn(n, CHANNELS, 6, 6, 6)


def _words(n):
    return torch.randint(WORDS, (n, STEPS))


def _first(out):
    return out[0]


class OnPair(nn.Module):
    """Calls a layer with its input and something made of it."""

    def __init__(self, layer, other=torch.tanh):
        super().__init__()
        self.layer, self.other = layer, other

    def forward(self, x):
        return self.layer(x, self.other(x))


class LastStep(nn.Module):
    """A recurrent layer, of which the last output is used."""

    def __init__(self, layer, state=False):
        super().__init__()
        self.layer, self.state = layer, state

    def forward(self, x):
        outputs, state = self.layer(x)
        return (state[0] if isinstance(state, tuple) else state)[-1] if self.state else outputs[:, -1]


class Attention(nn.Module):
    """Attention of tokens to each other."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


class StepsFirst(nn.Module):
    """A layer that is given ``(steps, samples, features)``."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        out = self.layer(x.transpose(0, 1))
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


class Packed(nn.Module):
    """An LSTM over sequences of different lengths."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3)

    def forward(self, x):
        lengths = 3 + (x[:, 0, 0] > 0).long() * 4
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=STEPS)
        return self.head(outputs.sum(1))


class ClassToken(nn.Module):
    """A parameter of the module's own before the tokens, and one that is added to all of them."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, STEPS + 1, WIDTH))
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x):
        tokens = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.layer(torch.tanh(tokens)).sum(1)


class Positions(nn.Module):
    """Positions that are looked up once for the whole batch."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(STEPS, WIDTH)
        self.layer = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.layer(torch.tanh(self.words(x) + self.places(torch.arange(x.shape[1])))).sum(1)


class Tied(nn.Module):
    """Input and output share one table."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(torch.tanh(self.words(x)))


class Folded(nn.Module):
    """Every token of every sample is a row of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.layer(x.flatten(0, 1))).unflatten(0, x.shape[:2]).sum(1))


def _encoder(**options):
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True, **options),
        2,
        enable_nested_tensor=False,
    )


def _recurrent(kind, **options):
    return lambda: LastStep(kind(WIDTH, WIDTH, batch_first=True, **options))


LAYERS = [
    Entry("`Linear`", lambda: nn.Linear(WIDTH, WIDTH), _rows),
    Entry("`Linear` over tokens", lambda: nn.Linear(WIDTH, WIDTH), _tokens),
    Entry("`Linear` over tokens folded into the batch", Folded, _tokens),
    Entry("`BlockCirculantLinear`", lambda: BlockCirculantLinear(WIDTH, WIDTH, 8), _rows),
    Entry("`BlockCirculantLinear` over tokens", lambda: BlockCirculantLinear(WIDTH, WIDTH, 8), _tokens),
    Entry("`Bilinear`", lambda: OnPair(nn.Bilinear(WIDTH, WIDTH, 8)), _rows),
    Entry("`Conv1d`", lambda: nn.Conv1d(CHANNELS, 16, 3), _sequences),
    Entry("`Conv2d`", lambda: nn.Conv2d(CHANNELS, 16, 3), _images),
    Entry(
        "`Conv2d`, circular padding, groups",
        lambda: nn.Conv2d(CHANNELS, 16, 3, 2, 1, 1, 2, padding_mode="circular"),
        _images,
    ),
    Entry("`Conv3d`", lambda: nn.Conv3d(CHANNELS, 16, 3), _volumes),
    Entry("`ConvTranspose1d`", lambda: nn.ConvTranspose1d(CHANNELS, 16, 3), _sequences),
    Entry("`ConvTranspose2d`", lambda: nn.ConvTranspose2d(CHANNELS, 16, 3, 2), _images),
    Entry("`ConvTranspose3d`", lambda: nn.ConvTranspose3d(CHANNELS, 16, 3), _volumes),
    Entry("`Embedding`", lambda: nn.Embedding(WORDS, WIDTH), _words),
    Entry("`Embedding`, `max_norm`", lambda: nn.Embedding(WORDS, WIDTH, max_norm=1.0), _words),
    Entry("`Embedding`, `scale_grad_by_freq`", lambda: nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True), _words),
    Entry("`Embedding` of positions, once for the batch", Positions, _words),
    Entry("`Embedding` tied to the output layer", Tied, _words),
    Entry("`EmbeddingBag`", lambda: nn.EmbeddingBag(WORDS, WIDTH), _words),
    Entry("`LayerNorm`", lambda: nn.LayerNorm(WIDTH), _tokens),
    Entry("`RMSNorm`", lambda: nn.RMSNorm(WIDTH), _tokens),
    Entry("`GroupNorm`", lambda: nn.GroupNorm(2, CHANNELS), _images),
    Entry("`InstanceNorm2d`, affine", lambda: nn.InstanceNorm2d(CHANNELS, affine=True), _images),
    Entry("`BatchNorm2d`, training", lambda: nn.BatchNorm2d(CHANNELS), _images),
    Entry("`BatchNorm2d`, evaluation", lambda: nn.BatchNorm2d(CHANNELS).eval(), _images),
    Entry("`PReLU`", lambda: nn.PReLU(CHANNELS), _images),
    Entry("`RNN`", _recurrent(nn.RNN), _tokens),
    Entry("`GRU`", _recurrent(nn.GRU), _tokens),
    Entry("`LSTM`", _recurrent(nn.LSTM), _tokens),
    Entry("`LSTM`, two layers, both directions", _recurrent(nn.LSTM, num_layers=2, bidirectional=True), _tokens),
    Entry("`LSTM`, projected", _recurrent(nn.LSTM, proj_size=16), _tokens),
    Entry("`LSTM`, its last state", lambda: LastStep(nn.LSTM(WIDTH, WIDTH, batch_first=True), state=True), _tokens),
    Entry("`LSTM`, packed sequences", Packed, _tokens),
    Entry("`LSTM`, `batch_first=False`", lambda: StepsFirst(nn.LSTM(WIDTH, WIDTH)), _tokens),
    Entry("`LSTMCell`", lambda: nn.LSTMCell(WIDTH, WIDTH), _rows, _first),
    Entry("`GRUCell`", lambda: nn.GRUCell(WIDTH, WIDTH), _rows),
    Entry("`RNNCell`", lambda: nn.RNNCell(WIDTH, WIDTH), _rows),
    Entry("`MultiheadAttention`", lambda: Attention(nn.MultiheadAttention(WIDTH, 4, batch_first=True)), _tokens),
    Entry(
        "`MultiheadAttention`, `batch_first=False`",
        lambda: StepsFirst(Attention(nn.MultiheadAttention(WIDTH, 4))),
        _tokens,
    ),
    Entry("`TransformerEncoder`", _encoder, _tokens),
    Entry(
        "`TransformerDecoderLayer`",
        lambda: OnPair(nn.TransformerDecoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)),
        _tokens,
    ),
    Entry(
        "`Transformer`",
        lambda: OnPair(nn.Transformer(WIDTH, 4, 1, 1, 128, dropout=0.0, batch_first=True)),
        _tokens,
    ),
    Entry("parameters of a module of your own (class token)", ClassToken, _tokens),
    Entry("`weight_norm` of a `Linear`", lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), _rows),
    Entry("`spectral_norm`, evaluation", lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)).eval(), _rows),
    Entry("`orthogonal`", lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), _rows),
]
