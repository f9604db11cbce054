"""``nn.Conv3d`` against a loop over samples in float64."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.hostile import worst_move
from tests.support.recorded_models import Reused, check
from torch import nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.gradients import sums as weighted_sums
from spectral_dp.gradients.rules.registry import find_rule
from spectral_dp.mechanism.filters import LowPassFilter


@settings(max_examples=50, deadline=None)
@given(
    kernel=st.tuples(*[st.integers(1, 3)] * 3),
    stride=st.integers(1, 2),
    padding=st.one_of(st.integers(0, 1), st.sampled_from(["valid", "same"])),
    dilation=st.integers(1, 2),
    groups=st.integers(1, 2),
    mode=st.sampled_from(["zeros", "replicate", "circular"]),
    bias=st.booleans(),
)
def test_equals_a_loop_over_samples(kernel, stride, padding, dilation, groups, mode, bias):
    assume(padding != "same" or (stride == 1 and all(k % 2 for k in kernel)))
    layer = nn.Conv3d(2 * groups, 3 * groups, kernel, stride, padding, dilation, groups, bias, mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weighted_sums, "CHUNK_BYTES", 1)  # two samples at a time
        check(nn.Sequential(layer).double(), torch.randn(3, 2 * groups, 5, 6, 5, dtype=torch.float64))


def test_several_uses():
    check(Reused(nn.Conv3d(2, 2, 3, padding=1)).double(), torch.randn(3, 2, 3, 4, 3, dtype=torch.float64))


def test_refuses_a_filter():
    layer = nn.Conv3d(2, 2, 3)
    with pytest.raises(ValueError, match="no spectrum"):
        find_rule(layer)(layer, LayerConfig(LowPassFilter(0.5)))


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (8, 3, 3, 3)], ids=["formed", "gram"])
def test_no_record_moves_the_sums_further_than_the_bound(shape):
    assert 0.5 < worst_move(lambda: nn.Conv3d(shape[0], 3 * shape[0], 2), *shape) <= 1 + 1e-5


def test_control_norms_of_positions_added_up_are_caught(monkeypatch):
    monkeypatch.setattr(
        "spectral_dp.gradients.rules.conv3d.token_norms",
        lambda x, dA: (x.square().sum(2) * dA.square().sum(2)).sum(1).double(),
    )
    assert worst_move(lambda: nn.Conv3d(2, 3, 2), 2, 4, 4, 4) > 1.2
