"""Tables that are filtered over their rows: positions, whose rows have an order; and patches beside them."""

import pytest
import torch
from tests.support.oracle import coordinates, norm_of, relative_error, sample_gradients
from tests.support.recorded_models import TOLERANCE
from torch import nn

from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.mechanism.filters import LowPassFilter

FILTERS = [LowPassFilter(0.5), LowPassFilter(0.3, order="clip_then_filter"), LowPassFilter(0.0)]


class Patches(nn.Module):
    """Patches of an image with positions, each sample with its own row of them."""

    def __init__(self):
        super().__init__()
        self.patches, self.positions, self.head = nn.Conv2d(2, 5, 4, 4), nn.Embedding(12, 5), nn.Linear(5, 3)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).mT
        places = torch.arange(tokens.shape[1]).expand(len(x), -1)
        return self.head(torch.tanh(tokens + self.positions(places))).sum(1)


@pytest.mark.parametrize("filter", FILTERS, ids=str)
@pytest.mark.parametrize("transform", ["dct", "fourier", "haar"])
def test_the_loop_over_samples(filter, transform):
    torch.manual_seed(0)
    size = 8 if transform == "haar" else 9
    model, config = nn.Embedding(size, 4).double(), LayerConfig(filter, transform)
    x = torch.randint(size, (5, 6))  # some rows twice, some never
    gradients = ModelGradients(model, {"": config})
    out = model(x)
    dA = torch.randn_like(out)
    (out * dA).sum().backward()
    batch = gradients.take()
    c = torch.rand(5).double()
    norms, (total,) = batch.squared_norms().sum(0), batch.clipped_sums(c).values()
    gradients.remove()
    tables = sample_gradients(model, (x,), dA)["weight"].mT  # (B, E, V)
    kept, counted = coordinates(tables, (size,), config, transform)
    assert relative_error(norms, norm_of({"weight": counted})) < TOLERANCE
    assert relative_error(total, torch.tensordot(c, kept, dims=1)) < TOLERANCE
    assert gradients.gradient(model.weight, total).shape == model.weight.shape
    if filter.ratio == 0:
        expected = torch.tensordot(c, tables.mT, dims=1)
        assert relative_error(gradients.gradient(model.weight, total), expected) < TOLERANCE


def test_positions_and_patches_of_one_model():
    """What is released of each is as long as the filter keeps; a smooth table loses nothing."""
    model = Patches().double()
    configs = {"positions": LayerConfig(LowPassFilter(0.5)), "patches": LayerConfig(LowPassFilter(0.5))}
    gradients = ModelGradients(model, configs)
    model(torch.randn(4, 2, 12, 16).double()).square().sum().backward()
    batch = gradients.take()
    sums = batch.clipped_sums(torch.ones(4))
    gradients.remove()
    assert sums[model.positions.weight].shape == (5, 6)
    assert sums[model.patches.weight].shape == (5, 2, 8)
    low = gradients.gradient(model.positions.weight, sums[model.positions.weight])
    again = gradients.owner(model.positions.weight).rule.projection.analyse(low.mT)
    torch.testing.assert_close(again, sums[model.positions.weight])


def test_a_row_that_must_stay_is_refused():
    with pytest.raises(ValueError, match="padding_idx keeps a row"):
        ModelGradients(nn.Embedding(9, 4, padding_idx=0), {"": LayerConfig(LowPassFilter(0.5))})


class Positions(nn.Module):
    """Looks positions up once, for all samples."""

    def __init__(self):
        super().__init__()
        self.positions, self.out = nn.Embedding(8, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(torch.tanh(x + self.positions(torch.arange(8))))


def test_positions_that_all_samples_share_are_filtered_for_each_of_them():
    torch.manual_seed(0)
    model, x, dA = Positions().double(), torch.randn(4, 8, 6).double(), torch.randn(4, 8, 2).double()
    gradients = ModelGradients(model, {"positions": LayerConfig(LowPassFilter(0.5))})
    model(x).backward(dA)
    batch, rule = gradients.take(), gradients.blocks[0][0].rule
    norms, sums = batch.squared_norms(), batch.clipped_sums(torch.ones(4).double())
    gradients.remove()
    expected = sample_gradients(model, (x,), dA)["positions.weight"]
    z = rule.projection.analyse(expected.mT)
    torch.testing.assert_close(norms[0], z.square().sum((1, 2)))
    torch.testing.assert_close(sums[model.positions.weight], z.sum(0))
