"""Attention with layers for its projections: the same outputs as nn.MultiheadAttention, private and block-circulant."""

import pytest
import torch
from torch import nn

from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.layers import BlockCirculantLinear, convert_linear
from spectral_dp.mechanism.filters import LowPassFilter
from spectral_dp.split_attention import SplitAttention
from tests.support.recorded_models import check

B, L, S, E, HEADS = 3, 5, 4, 8, 2


def inputs(batch_first=True, kdim=E, vdim=E):
    torch.manual_seed(0)
    shapes = [(B, L, E), (B, S, kdim), (B, S, vdim)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [t if batch_first else t.transpose(0, 1) for t in tensors]


def masks(kind):
    padding = torch.tensor([[False] * 4, [False, False, False, True], [False, False, True, True]])
    pairs = torch.randn(L, S, dtype=torch.float64)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "pairs": {"attn_mask": pairs},
        "forbidden": {"attn_mask": torch.ones(L, S).tril(-2).bool()},
        "of each head": {"attn_mask": torch.randn(B * HEADS, L, S, dtype=torch.float64)},
        "both": {"key_padding_mask": torch.where(padding, -torch.inf, 0.0).double(), "attn_mask": pairs},
    }[kind]


@pytest.mark.parametrize("kind", ["none", "padding", "pairs", "forbidden", "of each head", "both"])
@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"kdim": 6, "vdim": 3}, {"batch_first": False}], ids=str)
def test_outputs_and_weights_are_those_of_torch(kind, settings):
    settings = {"batch_first": True, **settings}
    theirs = nn.MultiheadAttention(E, HEADS, **settings).double()
    nn.init.normal_(theirs.out_proj.weight)
    ours = SplitAttention.from_attention(theirs)
    tensors = inputs(settings["batch_first"], settings.get("kdim", E), settings.get("vdim", E))
    given = masks(kind)
    for need in ({"need_weights": True}, {"need_weights": True, "average_attn_weights": False}):
        out, weights = ours(*tensors, **given, **need)
        expected, their_weights = theirs(*tensors, **given, **need)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(weights, their_weights)
    out, none = ours(*tensors, **given, need_weights=False)
    torch.testing.assert_close(out, expected)
    assert none is None


@pytest.mark.parametrize("settings", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_what_has_more_than_dense_layers_is_refused_and_not_converted(settings):
    attention = nn.MultiheadAttention(E, HEADS, **settings)
    with pytest.raises(ValueError, match="cannot be split"):
        SplitAttention.from_attention(attention)
    assert isinstance(convert_linear(nn.Sequential(attention), 4)[0], nn.MultiheadAttention)


def test_calls_that_cannot_be_answered_name_the_fix():
    ours = SplitAttention(E, HEADS)
    with pytest.raises(ValueError, match=r"add x\[None\]"):
        ours(*[torch.randn(L, E)] * 3)
    with pytest.raises(ValueError, match="give the mask"):
        ours(*[torch.randn(L, B, E)] * 3, is_causal=True)
    with pytest.raises(ValueError, match="divisor"):
        SplitAttention(E, 3)


def test_dropout_keeps_the_mean():
    ours = SplitAttention(E, HEADS, dropout=0.5, batch_first=True).double()
    x = inputs()
    dropped = torch.stack([ours(*x)[0] for _ in range(400)])
    torch.testing.assert_close(dropped.mean(0), ours.eval()(*x)[0], atol=0.1, rtol=0)
    assert dropped.std(0).min() > 0.01


def test_frozen_parts_stay_frozen_and_the_mode_is_kept():
    theirs = nn.MultiheadAttention(E, HEADS).eval()
    theirs.in_proj_weight.requires_grad_(False)
    ours = SplitAttention.from_attention(theirs)
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert trained == {"q_proj.bias", "k_proj.bias", "v_proj.bias", "out_proj.weight", "out_proj.bias"}
    assert not ours.training


class Attending(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, x, x)[0] if self.attention.batch_first else self.sequence_first(x)

    def sequence_first(self, x):
        x = x.transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_per_sample_gradients_are_exact(batch_first):
    """With samples in the second dimension, the layers see them in the first all the same."""
    model = Attending(SplitAttention(E, HEADS, batch_first=batch_first)).double()
    check(model, inputs()[0])
    check(convert_linear(model, 4), inputs()[0])


class TestConversion:
    def encoder(self):
        layer = nn.TransformerEncoderLayer(E, HEADS, 16, batch_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

    def test_the_projections_of_an_encoder_become_block_circulant(self):
        model = convert_linear(self.encoder(), 4)
        kinds = {name: type(m) for name, m in model.named_modules() if name.endswith(("proj", "linear1", "linear2"))}
        assert len(kinds) == 12
        assert set(kinds.values()) == {BlockCirculantLinear}

    @pytest.mark.parametrize("mode", ["train", "eval"])
    def test_it_computes_what_the_nearest_dense_encoder_does(self, mode):
        """Neither the fused path of torch, nor its nested tensors, may read weights that are no longer there."""
        model = self.encoder()
        converted = convert_linear(model, 4)
        model.use_nested_tensor = False  # of which torch warns
        dense = {name: m.to_dense() for name, m in converted.named_modules() if isinstance(m, BlockCirculantLinear)}
        for name, layer in model.named_modules():
            if isinstance(layer, nn.MultiheadAttention):
                parts = [dense[f"{name}.{which}_proj"] for which in "qkv"]
                layer.in_proj_weight.data = torch.cat([part.weight.data for part in parts])
                layer.out_proj.weight.data = dense[f"{name}.out_proj"].weight.data
            elif f"{name}" in dense and not name.endswith("out_proj"):
                layer.weight.data = dense[name].weight.data
        x, padding = torch.randn(B, L, E), torch.arange(L) >= torch.tensor([5, 3, 2])[:, None]
        getattr(model, mode)(), getattr(converted, mode)()
        with torch.set_grad_enabled(mode == "train"):
            out, expected = (m(x, src_key_padding_mask=padding) for m in (converted, model))
        torch.testing.assert_close(out[~padding], expected[~padding], atol=1e-5, rtol=1e-4)

    def test_attention_can_be_left_as_it_is(self):
        model = convert_linear(self.encoder(), 4, skip=["layers.0.self_attn"])
        assert isinstance(model.layers[0].self_attn, nn.MultiheadAttention)
        assert isinstance(model.layers[1].self_attn, SplitAttention)

    def test_it_is_filtered(self):
        model = convert_linear(self.encoder(), 4)
        gradients = ModelGradients(model, {"layers.0.self_attn.q_proj": LayerConfig(LowPassFilter(0.5))})
        model(torch.randn(B, L, E)).square().sum().backward()
        sums = gradients.take().clipped_sums(torch.ones(B))
        gradients.remove()
        weight = model.layers[0].self_attn.q_proj.weight
        assert sums[weight].numel() < weight.numel()
