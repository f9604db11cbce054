"""Several uses of the same parameters as one: the norm is that of the sum of their gradients, which is not formed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.recorded_models import check
from tests.support.recorded_uses import FILTERS, assert_same, conv_use
from torch import nn

from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.gradients.merging import Tied, merged
from spectral_dp.gradients.rules.embedding import EmbeddingRule
from spectral_dp.gradients.rules.linear import LinearRule
from spectral_dp.gradients.uses import Formed, Recorded


@pytest.mark.parametrize("filter", FILTERS, ids=repr)
def test_uses_are_added_whichever_they_are(filter):
    one, two = conv_use(filter), conv_use(filter)
    two = Recorded(one.rule, two.x, two.dA)
    (added,) = merged([one.formed(), two.formed()])
    assert_same(Formed.added([one, two.formed()]), added)
    assert merged([one, two]) == [one, two], "to form them would take more memory"


def test_recorded_uses_of_one_layer_are_merged_as_its_kind_can():
    rule = LinearRule(nn.Linear(3, 2).double(), LayerConfig())
    uses = [Recorded(rule, torch.randn(5, 3).double(), torch.randn(5, 2).double()) for _ in range(4)]
    (together,) = merged(uses)
    assert isinstance(together, Recorded)
    assert together.dA.shape == (5, 4, 2)
    assert_same(together, Formed.added(uses))


def tied_uses(vocabulary, width, samples, lookups, outputs, *, padding_idx=None, bias=True, dtype=torch.float64):
    """The uses of an embedding and of the output layer that has its weight."""
    table = nn.Embedding(vocabulary, width, padding_idx=padding_idx, dtype=dtype)
    decode = nn.Linear(width, vocabulary, bias=bias, dtype=dtype)
    decode.weight = table.weight
    embedding, linear = EmbeddingRule(table, LayerConfig()), LinearRule(decode, LayerConfig())
    x = torch.randint(vocabulary, (samples, lookups))
    return [
        Recorded(embedding, x, torch.randn(samples, lookups, width, dtype=dtype)),
        Recorded(
            linear,
            torch.randn(samples, outputs, width, dtype=dtype),
            torch.randn(samples, outputs, vocabulary, dtype=dtype),
        ),
    ]


class TestTied:
    @given(st.data())
    def test_norms_and_sums_are_those_of_the_formed_gradients(self, data):
        sizes = [data.draw(st.integers(1, most)) for most in (9, 300, 4, 6, 6)]
        padding_idx = data.draw(st.sampled_from([None, 0]))
        uses = tied_uses(*sizes, padding_idx=padding_idx, bias=data.draw(st.booleans()))
        (tied,) = merged(uses)
        assert isinstance(tied, Tied)
        assert_same(tied, Formed.added(uses))
        assert_same(tied.select(slice(0, 1)), Formed.added([use.select(slice(0, 1)) for use in uses]))
        assert_same(tied, tied.formed())

    def test_lookups_of_several_layers_and_several_uses_of_each(self):
        """As in an encoder and a decoder that share their embeddings."""
        first, output = tied_uses(6, 4, 3, 2, 3)
        other = nn.Embedding(6, 4)
        other.weight = first.rule.module.weight
        second = Recorded(EmbeddingRule(other, LayerConfig()), torch.randint(6, (3, 5)), torch.randn(3, 5, 4).double())
        uses = [first, second, output, first, output]
        (tied,) = merged(uses)
        assert isinstance(tied, Tied)
        assert_same(tied, Formed.added(uses))
        (lookups,) = merged([first, second])
        assert isinstance(lookups, Recorded)
        assert_same(lookups, Formed.added([first, second]))

    def test_other_rows_that_are_not_trained_are_not_mixed_up(self):
        first, output = tied_uses(6, 4, 3, 2, 3, padding_idx=0)
        other = nn.Embedding(6, 4)
        other.weight = first.rule.module.weight
        second = Recorded(EmbeddingRule(other, LayerConfig()), first.x, first.dA)
        assert not any(isinstance(use, Tied) for use in merged([first, second, output]))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_a_sample_whose_uses_cancel_is_not_clipped_too_little(self, dtype):
        """What is left is rounding errors, other ones in the norm than in the sum: a bound covers them."""
        lookups, output = tied_uses(5, 64, 200, 4, 3, bias=False, dtype=dtype)
        x, h, dY = lookups.x, output.x, output.dA.zero_()
        dY[:, 0].scatter_(1, x[:, :1], 1.0)
        lookups.dA.zero_()[:, 0] = -h[:, 0]
        lookups.dA[:, 1], h[:, 2] = 1e6 * h[:, 1], -1e6 * h[:, 1]
        dY[:, 2].scatter_(1, x[:, 1:2], 1.0)
        (tied,) = merged([lookups, output])
        norms = tied.squared_norms().sqrt()
        for b in range(len(x)):
            alone = tied.select(torch.tensor([b]))
            (total,) = alone.clipped_sums(torch.ones(1, dtype=dtype)).values()
            assert total.double().norm() <= norms[b]

    def test_the_norms_of_the_parts_alone_would_be_caught(self, monkeypatch):
        """The negative control: without what the two uses have in common, a norm may be too small."""
        lookups, output = tied_uses(5, 4, 1, 1, 1, bias=False)
        output.dA.zero_().scatter_(2, lookups.x[:, :, None], 1.0)
        output = Recorded(output.rule, lookups.dA.clone(), output.dA)  # both add the same
        (tied,) = merged([lookups, output])
        parts = lookups.squared_norms() + output.squared_norms()
        (total,) = tied.clipped_sums(torch.ones(1).double()).values()
        assert total.norm() ** 2 > 1.9 * parts
        assert total.norm() ** 2 <= tied.squared_norms()

    def test_no_table_is_formed_for_a_sample(self, monkeypatch):
        monkeypatch.setattr(Formed, "added", None)
        monkeypatch.setattr(Formed, "of", None)
        vocabulary, width = 50, 8
        embed, decode = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        decode.weight = embed.weight
        model = nn.Sequential(embed, nn.Tanh(), decode)
        gradients = ModelGradients(model)
        model(torch.randint(vocabulary, (3, 4))).square().sum().backward()
        batch = gradients.take()
        batch.clipped_sums(batch.squared_norms()[0])
        gradients.remove()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x) * self.embed(x.flip(1))))


def test_a_table_in_which_samples_look_up_twice():
    check(Twice().double(), torch.randint(7, (4, 3)))
