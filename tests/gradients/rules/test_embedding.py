"""Embeddings equal a loop over samples in float64."""

import pytest
import torch
from tests.support.exactness import B, check, rule_of
from tests.support.oracle import sample_gradients
from tests.support.uses import clipped_sums, squared_norms
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.mechanism.clipping import clip_factors


class TestEmbedding:
    @pytest.mark.parametrize("shape", [(), (6,), (2, 3)], ids=str)
    @pytest.mark.parametrize("padding_idx", [None, 2])
    def test_repeated_tokens_add_before_the_norm(self, shape, padding_idx):
        module = nn.Embedding(4, 3, padding_idx=padding_idx).double()
        x = torch.randint(4, (B, *shape))
        dA = torch.randn(B, *shape, 3, dtype=torch.float64)
        gradients = sample_gradients(module, (x,), dA)
        check(rule_of(module), x, dA, torch.rand(B).double(), gradients, gradients)

    def test_options_that_mix_samples_are_refused(self):
        with pytest.raises(ValueError, match="scale_grad_by_freq"):
            rule_of(nn.Embedding(4, 3, scale_grad_by_freq=True))
        with pytest.raises(ValueError, match="max_norm"):
            rule_of(nn.Embedding(4, 3, max_norm=1.0))


def test_an_embedding_hides_nothing_either():
    module = nn.Embedding(3, 1000)
    rule = find_rule(module)(module, LayerConfig())
    x = torch.zeros(1, 1, dtype=torch.long)
    for small in (1e-20, 1e-22, 1e-23, 1e-24):
        dA = torch.full((1, 1, 1000), small)
        c = clip_factors(squared_norms(rule, x, dA).sqrt(), 1e-23)
        assert float(clipped_sums(rule, x, dA, c)["weight"].double().norm()) <= 1e-23
