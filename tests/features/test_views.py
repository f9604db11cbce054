"""Views of images."""

import pytest
import torch

from spectral_dp.features import FeatureError
from spectral_dp.features.views import view_of


def test_mirrored_is_left_to_right():
    rows = torch.arange(4).view(1, 1, 2, 2)
    assert view_of(rows, "plain") is rows
    assert view_of(rows, "mirrored").tolist() == [[[[1, 0], [3, 2]]]]


def test_what_has_no_such_view_is_refused():
    with pytest.raises(FeatureError, match="choose one of plain, mirrored"):
        view_of(torch.zeros(1, 1, 2, 2), "upside-down")
    with pytest.raises(FeatureError, match="only images"):
        view_of(torch.zeros(1, 5), "mirrored")
