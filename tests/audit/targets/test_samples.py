"""Batches of any form are taken apart into samples, and samples put together to batches."""

import math

import pytest
import torch
from torch import nn

from spectral_dp.audit.targets.samples import InputForm, scaled

TOKENS, LENGTHS = torch.arange(12).view(3, 4), torch.tensor([4, 2, 1])


class Echo(nn.Module):
    def forward(self, *args, **kwargs):
        return args, kwargs


@pytest.mark.parametrize(
    "batch",
    [
        TOKENS,
        (TOKENS, LENGTHS, None),
        {"tokens": TOKENS, "lengths": LENGTHS, "return_dict": True},
        ((TOKENS, {"lengths": LENGTHS}), 0.5),
    ],
    ids=["tensor", "arguments", "keywords", "nested"],
)
def test_a_batch_is_made_of_its_samples_again(batch):
    form = InputForm(batch)
    samples = form.samples(batch)
    assert len(samples) == 3
    args, kwargs = form.call(Echo(), [samples[2], samples[0]])
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    given = torch.utils._pytree.tree_leaves(batch)
    for leaf, before in zip(leaves, given, strict=True):
        assert torch.equal(leaf, before[[2, 0]]) if isinstance(before, torch.Tensor) else leaf == before


@pytest.mark.parametrize("batch", [(TOKENS, LENGTHS[:2]), {"flag": True}, TOKENS[:0], torch.tensor(1.0)])
def test_a_batch_has_as_many_rows_everywhere(batch):
    with pytest.raises(ValueError, match="as many in the first dimension of every tensor"):
        InputForm(batch)


def test_what_is_no_batch_is_named():
    with pytest.raises(TypeError, match="got str"):
        InputForm("tokens")


@pytest.mark.parametrize("other", [TOKENS[:1, :3], (TOKENS[:1], LENGTHS[:1])])
def test_samples_of_another_form_are_refused(other):
    with pytest.raises(ValueError, match="padded to the same length"):
        InputForm(TOKENS).samples(other)


def test_only_real_numbers_are_scaled():
    real, whole = scaled((torch.ones(2), torch.tensor([3])), math.inf)
    assert real.isinf().all()
    assert whole.item() == 3
