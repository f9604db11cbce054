"""``nn.EmbeddingBag``: bags as rows, or one after the other with offsets, against a loop over samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.oracle import norm_of, relative_error
from tests.support.recorded_models import check
from torch import nn

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.rules.embedding import EmbeddingBagRule
from spectral_dp.mechanism.clipping import clip_factors


def bags(sizes, words=7):
    return [torch.randint(words, (size,)) for size in sizes]


def gradients_of(layer, tokens, *arguments, dA):
    gradients = ModelGradients(layer)
    assert isinstance(gradients.blocks[0][0].rule, EmbeddingBagRule)
    (layer(tokens, *arguments) * dA).sum().backward()
    batch = gradients.take()
    gradients.remove()
    return batch


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    rows=st.booleans(),
    mode=st.sampled_from(["sum", "mean"]),
    padding=st.booleans(),
    last=st.booleans(),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_a_loop_over_samples(sizes, rows, mode, padding, last, weighted, seed):
    torch.manual_seed(seed)
    sizes = [3] * len(sizes) if rows else sizes
    layer = nn.EmbeddingBag(
        7, 3, mode=mode, padding_idx=2 if padding else None, include_last_offset=last and not rows
    ).double()
    samples, dA, c = bags(sizes), torch.randn(len(sizes), 3).double(), torch.rand(len(sizes)).double()
    weights = [torch.rand(len(s)).double() for s in samples] if weighted and mode == "sum" else None
    ends = torch.tensor([0, *sizes]).cumsum(0)
    if rows:
        arguments = (torch.stack(samples), None, None if weights is None else torch.stack(weights))
    else:
        offsets = ends if last else ends[:-1]
        arguments = (torch.cat(samples), offsets, None if weights is None else torch.cat(weights))
    batch = gradients_of(layer, *arguments, dA=dA)
    expected = []
    for b, sample in enumerate(samples):
        own = None if weights is None else weights[b]
        offsets = torch.tensor([0, len(sample)]) if layer.include_last_offset else torch.tensor([0])
        out = layer(sample, offsets, own)
        expected.append(torch.autograd.grad((out * dA[b]).sum(), layer.weight)[0])
    expected = torch.stack(expected)
    assert relative_error(batch.squared_norms().sum(0), norm_of({"weight": expected})) < 1e-9
    assert relative_error(batch.clipped_sums(c)[layer.weight], torch.tensordot(c, expected, dims=1)) < 1e-9
    (use,) = batch._blocks[0]
    assert relative_error(use.formed().gradients[layer.weight], expected) < 1e-9


def worst_move():
    torch.manual_seed(0)
    layer = nn.EmbeddingBag(7, 3, mode="sum")
    before = None
    worst = 0.0
    base, dA = [torch.tensor([1, 2, 2])], torch.randn(2, 3)
    for record in (torch.zeros(400).long(), torch.arange(7), torch.tensor([], dtype=torch.long)):
        for size in (1.0, 1e6, 1e18, 1e-20):
            moved = []
            for samples in (base, [*base, record]):
                ends = torch.tensor([0, *map(len, samples)]).cumsum(0)
                d = torch.cat([dA[:1], dA[1:] * size])[: len(samples)]
                batch = gradients_of(layer, torch.cat(samples), ends[:-1], dA=d)
                c = clip_factors(batch.squared_norms().sum(0).sqrt(), 0.7)
                moved.append(batch.clipped_sums(c)[layer.weight].double())
            before, after = moved
            worst = max(worst, float((after - before).norm()) / 0.7)
    return worst


def test_no_record_moves_the_sums_further_than_the_bound():
    assert 0.5 < worst_move() <= 1 + 1e-5


def test_control_repeated_words_counted_apart_are_caught(monkeypatch):
    monkeypatch.setattr(
        EmbeddingBagRule, "squared_norms", lambda self, x, dA: self.positions(x, dA)[1].double().square().sum((1, 2))
    )
    assert worst_move() > 5


@pytest.mark.filterwarnings("ignore:no rule for", "ignore:torch.func cannot run")
def test_the_maximum_has_no_rule():
    layer = nn.EmbeddingBag(7, 3, mode="max")
    gradients = ModelGradients(layer)
    assert not isinstance(gradients.blocks[0][0].rule, EmbeddingBagRule)
    gradients.remove()


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_what_mixes_samples_is_refused(option):
    with pytest.raises(ValueError, match="set it to"):
        ModelGradients(nn.EmbeddingBag(7, 3, **option))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_several_bags_of_a_sample_and_bags_that_samples_share(mode):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.out = nn.EmbeddingBag(7, 3, mode=mode, padding_idx=2), nn.Linear(3, 2)

        def forward(self, x):
            own = self.bag((x.flatten(0, 1) > 0).long() * 3 + 1).unflatten(0, x.shape[:2])
            return self.out(torch.tanh(own + self.bag(torch.arange(6).view(2, 3))))

    torch.manual_seed(0)
    check(Bags().double(), torch.randn(4, 2, 5).double())
