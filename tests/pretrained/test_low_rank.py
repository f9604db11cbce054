"""LoRA: the network begins as it was, and only the additions are trained."""

import pytest
import torch
from tests.support.pretrained import small_inputs, small_network
from torch import nn

from spectral_dp.pretrained.low_rank import LowRankLinear, add_low_rank


def test_begins_as_it_was():
    network, pieces = small_network("minilm-l6", 3), small_inputs("minilm-l6")
    expected = network(pieces)
    adapted = add_low_rank(network.requires_grad_(False), rank=2)
    assert torch.equal(adapted(pieces), expected)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2  # layers, query and value, down and up
    assert all(".down." in name or ".up." in name for name in trained)


def test_adds_a_product_of_low_rank():
    linear = nn.Linear(6, 4)
    layer, x = LowRankLinear(linear, rank=2, alpha=3.0), torch.randn(5, 6)
    nn.init.normal_(layer.up.weight)
    assert torch.allclose(layer(x), linear(x) + 1.5 * x @ (layer.up.weight @ layer.down.weight).T, atol=1e-6)


def test_bad_input():
    with pytest.raises(ValueError, match="rank is from 1 to 4"):
        LowRankLinear(nn.Linear(6, 4), rank=5, alpha=1.0)
    with pytest.raises(ValueError, match="no dense layer is called gate: choose from dense, key, query, value"):
        add_low_rank(small_network("minilm-l6"), ["gate"])
