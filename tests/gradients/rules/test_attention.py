"""``nn.MultiheadAttention`` and the transformers made of it, against a loop over samples in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hostile import worst_move
from tests.support.recorded_models import check_losses
from torch import nn

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.rules.attention import AttentionRule
from spectral_dp.gradients.rules.fallback import FallbackRule

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask is deprecated")


class Attending(nn.Module):
    """Attention between two sequences that are made of the inputs, with masks of every kind."""

    def __init__(self, attention, n, *, cross=True, mask=None, padded=False, need_weights=True, average=True):
        super().__init__()
        self.attention, self.cross, self.mask, self.padded = attention, cross, mask, padded
        self.options = {"need_weights": need_weights, "average_attn_weights": average}
        sizes = (attention.embed_dim, attention.kdim, attention.vdim) if cross else (attention.embed_dim,)
        self.embed = nn.ModuleList(nn.Linear(n, size) for size in sizes)

    def forward(self, x, y, lengths):
        first = self.attention.batch_first
        sources = (x, y, y)[: len(self.embed)]
        tokens = [embed(source) for embed, source in zip(self.embed, sources, strict=True)]
        tokens = [t if first else t.transpose(0, 1) for t in tokens]
        q, k, v = tokens if self.cross else tokens * 3
        queries, keys = x.shape[1], (y if self.cross else x).shape[1]
        mask = padding = None
        if self.mask is not None:
            mask = torch.arange(keys)[None] > torch.arange(queries)[:, None] + 1
            if "each" in self.mask:
                mask = mask.expand(len(x) * self.attention.num_heads, -1, -1)
            if "real" in self.mask:
                mask = mask * -2.0
                mask = mask.to(x.dtype)
        if self.padded:
            padding = torch.arange(keys) >= lengths.clamp(max=keys)[:, None]
        out, weights = self.attention(q, k, v, key_padding_mask=padding, attn_mask=mask, **self.options)
        return out if first else out.transpose(0, 1), weights


def losses(model, x, y, lengths):
    out, weights = model(x, y, lengths)
    total = out.sin().flatten(1).sum(1)
    return total if weights is None else total + weights.square().flatten(1).sum(1) * 3


def batch(samples=3, queries=4, keys=5, n=3):
    x, y = (torch.randn(samples, tokens, n, dtype=torch.float64) for tokens in (queries, keys))
    return x, y, torch.randint(1, keys + 1, (samples,))


@settings(max_examples=80, deadline=None)
@given(
    heads=st.integers(1, 3),
    width=st.integers(1, 2),
    cross=st.booleans(),
    other_sizes=st.booleans(),
    bias=st.booleans(),
    bias_kv=st.booleans(),
    zero=st.booleans(),
    batch_first=st.booleans(),
    mask=st.sampled_from([None, "truth", "real", "truth each", "real each"]),
    padded=st.booleans(),
    need_weights=st.booleans(),
    average=st.booleans(),
    samples=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_equals_a_loop_over_samples(
    heads,
    width,
    cross,
    other_sizes,
    bias,
    bias_kv,
    zero,
    batch_first,
    mask,
    padded,
    need_weights,
    average,
    samples,
    seed,
):
    torch.manual_seed(seed)
    sizes = {"kdim": 2, "vdim": 5} if cross and other_sizes else {}
    attention = nn.MultiheadAttention(
        heads * width, heads, bias=bias, add_bias_kv=bias_kv, add_zero_attn=zero, batch_first=batch_first, **sizes
    )
    for name, p in attention.named_parameters():
        if "bias" in name:
            nn.init.normal_(p)  # torch begins with zeros
    options = {"mask": mask, "padded": padded, "need_weights": need_weights, "average": average}
    check_losses(Attending(attention, 3, cross=cross, **options).double(), losses, *batch(samples))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mask", [None, "truth", "real each"])
def test_dropout_is_that_of_the_forward_pass(need_weights, cross, batch_first, mask):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=batch_first)
    model = Attending(attention, 3, cross=cross, mask=mask, padded=True, need_weights=need_weights).double()
    check_losses(model, losses, *batch(5), draws=True)


def test_control_a_second_draw_is_refused(monkeypatch):
    monkeypatch.setattr("spectral_dp.gradients.recording.random_state.RandomState._restore", lambda self: None)
    model = Attending(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), 3).double()
    with pytest.raises(RuntimeError, match=r"another output.*drew other random numbers"):
        check_losses(model, losses, *batch(6), draws=True)


def test_control_a_forgotten_mask_is_caught(monkeypatch):
    """The output of the second run is compared with that of the first also without dropout, once."""
    monkeypatch.setattr(AttentionRule, "_mask", lambda *_: None)
    model = Attending(nn.MultiheadAttention(8, 2, batch_first=True), 3, padded=True).double()
    with pytest.raises(RuntimeError):
        check_losses(model, losses, *batch(6))


def test_gradients_flow_on_to_a_learnt_mask():
    class Learnt(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.scores = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(3, 20)

        def forward(self, x, y, lengths):
            tokens = torch.cat([x, x[..., :1]], dim=2)
            mask = self.scores(y[:, 0]).view(-1, 4, 5).repeat_interleave(2, dim=0)
            keys = torch.cat([y, y[..., :1]], dim=2)
            return self.attention(tokens, keys, keys, attn_mask=mask)

    check_losses(Learnt().double(), losses, *batch())


@pytest.mark.parametrize("frozen", [["in_proj_weight"], ["out_proj.weight", "in_proj_bias"], ["out_proj.bias"]])
def test_frozen_parameters(frozen):
    model = Attending(nn.MultiheadAttention(4, 2, batch_first=True), 3).double()
    for name in frozen:
        model.attention.get_parameter(name).requires_grad_(False)
    check_losses(model, losses, *batch())


@pytest.mark.parametrize("same", [True, False])
def test_two_uses_are_added_before_the_norm(same):
    """Of the same kind, or once self- and once cross-attention."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x, y, lengths):
            x, y = self.embed(x), self.embed(y)
            first = self.attention(x, x, x)[0]
            other = x.cos()
            second = self.attention(other, other, other)[0] if same else self.attention(x, y, y)[0]
            return first + second, None

    check_losses(Twice().double(), losses, *batch())


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_whole_transformer_has_rules_throughout(norm_first, dropout):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"dropout": dropout, "batch_first": True, "norm_first": norm_first}
            self.embed = nn.Linear(3, 8)
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, **options), 2, enable_nested_tensor=False
            )
            self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, **options), 2)

        def forward(self, x, y, lengths):
            padding = torch.arange(y.shape[1]) >= lengths[:, None]
            memory = self.encoder(self.embed(y), src_key_padding_mask=padding)
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.decoder(self.embed(x), memory, tgt_mask=causal, memory_key_padding_mask=padding), None

    torch.manual_seed(0)
    model = Network().double()
    gradients = ModelGradients(model)
    assert not any(isinstance(layer.rule, FallbackRule) for block in gradients.blocks for layer in block)
    gradients.remove()
    check_losses(model, losses, *batch(), draws=dropout > 0)
    check_losses(model.eval(), losses, *batch())  # no fast path with gradients


def test_an_exchanged_part_is_not_of_the_kind():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    nn.utils.parametrizations.weight_norm(attention.out_proj)
    with pytest.warns(UserWarning, match="no rule for"):
        gradients = ModelGradients(attention)
    assert isinstance(gradients.blocks[0][0].rule, FallbackRule)
    gradients.remove()


def test_an_empty_batch_has_zero_sums():
    model = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    gradients = ModelGradients(model)
    x = torch.randn(0, 3, 4)
    model(x, x, x)[0].sum().backward()
    sums = gradients.take().clipped_sums(torch.ones(0))
    gradients.remove()
    assert all(not bool(value.any()) for value in sums.values())


def test_a_mask_of_padding_that_needs_a_gradient_is_refused():
    model, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    gradients = ModelGradients(model)
    with pytest.raises(RuntimeError, match="detach it"):
        model(x, x, x, key_padding_mask=torch.randn(2, 3, requires_grad=True))[0].sum().backward()
    gradients.remove()


def test_an_unbatched_sample_is_refused():
    model = nn.MultiheadAttention(4, 2)
    gradients = ModelGradients(model)
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="unbatched"):
        model(x, x, x)[0].sum().backward()
    gradients.remove()


def move():
    return worst_move(
        lambda: nn.MultiheadAttention(6, 2, batch_first=True), 12, 6, outputs=lambda model, x: model(x, x, x)[0]
    )


def test_no_record_moves_the_sums_further_than_the_bound():
    assert 0.5 < move() <= 1 + 1e-5


def test_control_norms_of_tokens_added_up_are_caught(monkeypatch):
    monkeypatch.setattr(
        "spectral_dp.gradients.rules.dense_maps.token_norms",
        lambda x, dA: (x.square().sum(2) * dA.square().sum(2)).sum(1),
    )
    assert move() > 1.2


@pytest.mark.parametrize("was_training", [False, True])
def test_dropout_is_that_of_the_forward_pass_in_whatever_mode_the_backward_pass_finds_the_layer(was_training):
    """An attention that was evaluated and then set to training drew masks that its forward pass did not have."""
    torch.manual_seed(0)
    model = Attending(nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), 3).double()

    def in_one_mode(model, *inputs):
        model.train(was_training)
        value = losses(model, *inputs)
        model.train(not was_training)
        return value

    check_losses(model, in_one_mode, *batch(6), draws=was_training)


def test_a_parameter_in_two_places_gets_the_sum_of_its_gradients():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, kdim=5, vdim=5, batch_first=True)
    attention.v_proj_weight = attention.k_proj_weight

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.queries, self.keys, self.attention = nn.Linear(3, 4), nn.Linear(3, 5), attention

        def forward(self, x, y, lengths):
            keys = self.keys(y)
            return self.attention(self.queries(x), keys, keys)[0], None

    check_losses(Shared().double(), losses, *batch())
