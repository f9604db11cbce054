"""A small transformer and a small LSTM classifier as audit targets, with the records that are hardest to bound.

``BROKEN_RULES`` are rules that forget a part of the norm; ``Crowd`` and ``Carrying`` are models that no rule can save.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from spectral_dp import SpectralConfig, audit, convert_linear
from spectral_dp.gradients.rules.attention import AttentionRule
from spectral_dp.gradients.rules.dense_maps import DenseMaps
from spectral_dp.gradients.rules.recurrent import RecurrentRule

WORDS, STEPS, WIDTH, CLASSES = 11, 6, 8, 3
CLAIM = audit.Claim(1.3, 0.7, 8, sample_rate=0.1, steps=40, delta=1e-5)


class Transformer(nn.Module):
    """An encoder layer over token and position embeddings; padding is neither looked at nor averaged."""

    def __init__(self, layers: int = 1):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(STEPS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Takes tokens ``(B, T)`` and a mask ``(B, T)``, true where there is a token."""
        places = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        x = self.encoder(self.words(tokens) + self.positions(places), src_key_padding_mask=~mask)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Recurrent(nn.Module):
    """An LSTM over packed sequences, with the last state classified."""

    def __init__(self, layers: int = 1, bidirectional: bool = False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, layers, batch_first=True, bidirectional=bidirectional)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Takes tokens ``(B, T)`` and lengths ``(B,)``; an empty sequence is one of a single padding."""
        packed = pack_padded_sequence(self.words(tokens), lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)
        return self.head(state[-1])


class Crowd(Transformer):
    """Every record also looks at the others of its batch."""

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        scores = super().forward(tokens, mask)
        return torch.softmax(scores @ scores.T, 1) @ scores


_LAST_STATE: dict[str, tuple[Tensor, Tensor]] = {}


class Carrying(Recurrent):
    """A batch begins with the state at which the one before ended; kept where the engine does not see it."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        last = _LAST_STATE.get("state")
        start = None if last is None else tuple(s.mean(1, keepdim=True).repeat(1, len(tokens), 1) for s in last)
        packed = pack_padded_sequence(self.words(tokens), lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
        _, (state, cell) = self.lstm(packed, start)
        _LAST_STATE["state"] = state.detach(), cell.detach()
        return self.head(state[-1])


class CarryingInside(Recurrent):
    """Keeps the last state as people do: in the model."""

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(tokens), lengths.clamp(min=1), batch_first=True, enforce_sorted=False)
        _, (state, _) = self.lstm(packed)
        self.last = state.mean(1, keepdim=True).detach()
        return self.head(state[-1])


def _tokens() -> tuple[Tensor, Tensor]:
    """Four sequences of one to all steps, at whose ends is padding."""
    lengths = torch.tensor([4, 1, STEPS, 2])
    tokens = torch.randint(1, WORDS, (4, STEPS), generator=torch.Generator().manual_seed(1))
    return tokens * (torch.arange(STEPS) < lengths[:, None]), lengths


def _hostile() -> dict[str, tuple[Tensor, Tensor]]:
    """The longest sequences, of one word or of all; the first and the last word; nothing but padding."""
    every = torch.arange(STEPS)[None] % (WORDS - 1) + 1
    full = torch.tensor([STEPS])
    return {
        "long": (every, full),
        "one word, long": (torch.full((1, STEPS), 3), full),
        "first word": (torch.zeros(1, STEPS, dtype=torch.long), full),
        "last word": (torch.full((1, STEPS), WORDS - 1), full),
        "empty": (torch.zeros(1, STEPS, dtype=torch.long), torch.tensor([0])),
    }


def _with_mask(tokens: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    return {"tokens": tokens, "mask": torch.arange(STEPS) < lengths[:, None]}


def transformer(kind=audit.SpectralTarget, model: Callable[..., nn.Module] = Transformer, layers: int = 1, **options):
    """The transformer with a block-circulant MLP, half of whose frequencies are released; its attention is torch's."""
    torch.manual_seed(0)
    made = convert_linear(model(layers), block_size=4, skip=lambda name, _: name == "head" or "self_attn" in name)
    return _transformer_target(kind, made, options)


def circulant_attention(kind=audit.SpectralTarget, **options):
    """The transformer with block-circulant projections inside of its attention, too."""
    torch.manual_seed(0)
    return _transformer_target(kind, convert_linear(Transformer(), block_size=4, skip=["head"]), options)


def _transformer_target(kind, made: nn.Module, options):
    return kind(
        made,
        CLAIM,
        batch=_with_mask(*_tokens()),
        hostile={name: _with_mask(*pair) for name, pair in _hostile().items()},
        **({"seed": 0, "spectral": SpectralConfig(linear_ratio=0.5)} | options),
    )


def recurrent(kind=audit.SpectralTarget, model: Callable[..., nn.Module] = Recurrent, **options):
    """The LSTM classifier."""
    torch.manual_seed(0)
    sizes = {name: options.pop(name) for name in ("layers", "bidirectional") if name in options}
    return kind(model(**sizes), CLAIM, batch=_tokens(), hostile=_hostile(), **({"seed": 0} | options))


class OneGateForgotten(RecurrentRule):
    """Leaves the first gate out of the norm, and not out of the sum."""

    def squared_norms(self, x: DenseMaps, dA: Tensor) -> Tensor:
        kept = tuple(each._replace(dA=each.dA[:, :, self.module.hidden_size :]) for each in x.maps)
        return super().squared_norms(x._replace(maps=kept), dA)


class OneProjectionForgotten(AttentionRule):
    """Leaves the projection of the output out of the norm, and not out of the sum."""

    def squared_norms(self, x: DenseMaps, dA: Tensor) -> Tensor:
        return super().squared_norms(x._replace(maps=x.maps[:-1]), dA)


class QueriesForgotten(AttentionRule):
    """Leaves the queries out of the norm, which are the first third of the projection into the attention."""

    def squared_norms(self, x: DenseMaps, dA: Tensor) -> Tensor:
        first = x.maps[0]
        kept = first._replace(dA=first.dA[:, :, self.module.embed_dim :])
        return super().squared_norms(x._replace(maps=(kept, *x.maps[1:])), dA)


#: What is forgotten: a model, the kind and the name of the layer, and its broken rule.
BROKEN_RULES = {
    "gate": (recurrent, nn.LSTM, "lstm", OneGateForgotten),
    "output projection": (
        transformer,
        nn.MultiheadAttention,
        "encoder.layers.0.self_attn",
        OneProjectionForgotten,
    ),
    "queries": (transformer, nn.MultiheadAttention, "encoder.layers.0.self_attn", QueriesForgotten),
}
