"""MiniLM is BERT as transformers has it, and padding does not change what comes out."""

import pytest
import torch
from tests.support.pretrained import small_network

from spectral_dp.pretrained.networks.minilm import MiniLM


def test_equals_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    theirs = transformers.BertModel(config, add_pooling_layer=False).eval()
    ours = small_network("minilm-l6")
    ours.load_state_dict(theirs.state_dict(), strict=True)
    pieces = torch.randint(1, 50, (3, 9))
    pieces[1, 5:] = 0
    with torch.no_grad():
        expected = theirs(input_ids=pieces, attention_mask=(pieces != 0).long()).last_hidden_state
        found = ours.maps(pieces)
    assert torch.allclose(found[pieces != 0], expected[pieces != 0], atol=1e-5)


def test_names_and_sizes_are_berts():
    with torch.device("meta"):
        network = MiniLM()
    layer = "encoder.layer.5.attention."
    names = ["embeddings.word_embeddings.weight", f"{layer}self.query.bias", f"{layer}output.LayerNorm.weight"]
    assert {*names, "encoder.layer.0.intermediate.dense.weight"} <= set(network.state_dict())
    assert (
        sum(p.numel() for p in network.parameters()) == 22_565_376
    )  # with the pooler, which is not used, 22.7 million


def test_padding_changes_nothing():
    network, pieces = small_network("minilm-l6"), torch.randint(1, 50, (2, 6))
    padded = torch.cat([pieces, torch.zeros(2, 4, dtype=torch.long)], dim=1)
    with torch.no_grad():
        assert torch.allclose(network(pieces), network(padded), atol=1e-5)


def test_a_row_of_padding_is_finite():
    with torch.no_grad():
        assert bool(small_network("minilm-l6")(torch.zeros(1, 4, dtype=torch.long)).isfinite().all())


@pytest.mark.parametrize("pieces", [torch.rand(2, 3), torch.ones(2, 600, dtype=torch.long), torch.ones(4).long()])
def test_what_are_no_word_pieces(pieces):
    with pytest.raises(ValueError, match="at most 512 word pieces"):
        small_network("minilm-l6")(pieces)
