"""Layers made of dense maps: norms and sums without per-sample gradients are those of the formed ones."""

import pytest
import torch
from torch import nn

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.rules.dense_maps import DenseMap, DenseMaps, DenseMapsRule
from spectral_dp.gradients.rules.layer_config import LayerConfig

B, T = 5, 4


class Pair(nn.Module):
    """Two weights that read one input side by side, a third with rows from two maps, and a small parameter."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 4))
        self.rows, self.bias, self.small = (nn.Parameter(torch.zeros(s)) for s in ((6, 5), 3, 2))


class PairRule(DenseMapsRule):
    def by_sample(self, outputs):
        raise NotImplementedError

    def open(self, call, dA):
        raise NotImplementedError


def setting(dtype=torch.float64):
    def random(*shape):
        return torch.randn(*shape, dtype=dtype)

    maps = (
        DenseMap((("left", 2), ("right", 4)), ("bias",), random(B, T, 6), random(B, T, 3)),
        DenseMap((("rows", 5),), (), random(B, T, 5), random(B, T, 2)),
        DenseMap((("rows", 5),), (), random(B, T, 5), random(B, T, 4)),
    )
    return PairRule(Pair().to(dtype), LayerConfig()), DenseMaps(maps, {"small": random(B, 2)}), torch.empty(B, 0)


def test_norms_and_sums_are_those_of_the_formed_gradients():
    """Catches a weight whose columns are mixed up with its neighbour's, and rows in another order."""
    rule, x, dA = setting()
    formed = rule.form(x, dA)
    assert {name: tuple(z.shape[1:]) for name, z in formed.items()} == {
        "left": (3, 2),
        "right": (3, 4),
        "rows": (6, 5),
        "bias": (3,),
        "small": (2,),
    }
    torch.testing.assert_close(rule.squared_norms(x, dA), sum(z.flatten(1).square().sum(1) for z in formed.values()))
    c = torch.rand(B, dtype=torch.float64)
    for name, total in rule.clipped_sum(x, dA, c).items():
        torch.testing.assert_close(total, torch.einsum("b,b...->...", c, formed[name]))


def test_several_uses_are_one_with_more_tokens():
    rule, x, dA = setting()
    _, y, _ = setting()
    merged, _ = rule.merge([(x, dA), (y, dA)])
    both = {name: z + rule.form(y, dA)[name] for name, z in rule.form(x, dA).items()}
    for name, z in rule.form(merged, dA).items():
        torch.testing.assert_close(z, both[name])


@pytest.mark.parametrize("layer", [nn.LSTM(4, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_precision_is_that_of_the_gradients_that_arrived(layer, dtype):
    """The maps are found in float32. A rehearsal that took this for the precision refused sound models in bfloat16."""
    inputs = (torch.randn(3, 5, 4),) * (1 if isinstance(layer, nn.LSTM) else 3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        try:
            layer(*inputs)
        except RuntimeError as error:  # of plain PyTorch
            pytest.skip(f"this processor has no {type(layer).__name__} in {dtype}: {error}")
        gradients = ModelGradients(layer)
        out = layer(*inputs)[0]
    assert out.dtype is dtype
    out.square().sum().backward()
    assert gradients.take().precision == torch.finfo(dtype).eps
    gradients.remove()
