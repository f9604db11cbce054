"""A layer that is run again must show the output that was recorded."""

import pytest
import torch
from torch import nn

from spectral_dp.gradients.rules.same_output import check_same_output

LAYER = nn.LSTM(2, 3)


def test_rounding_passes_and_other_masks_do_not():
    recorded = torch.randn(16, 10)
    check_same_output(LAYER, recorded * (1 + 1e-5), recorded)
    check_same_output(LAYER, recorded, recorded.bfloat16())
    with pytest.raises(RuntimeError, match="another output"):
        check_same_output(LAYER, recorded * (torch.rand(16, 10) < 0.5) * 2, recorded)


def test_one_record_does_not_stop_a_run():
    """A record so large that rounding decides, or one that is not finite, is one of many."""
    recorded = torch.randn(16, 10)
    again = recorded.clone()
    again[3] += 1e6
    check_same_output(LAYER, again, recorded)
    again[3] = torch.nan
    check_same_output(LAYER, again, recorded)


def test_an_output_that_is_not_known_is_refused():
    with pytest.raises(RuntimeError, match="changed in place"):
        check_same_output(LAYER, torch.ones(2, 2), None)


def test_an_empty_batch():
    check_same_output(LAYER, torch.zeros(0, 3), torch.zeros(0, 3))
