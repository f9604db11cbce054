"""Convolutions of every option, with the shape of a sample for each."""

import pytest
from torch import nn

CONVOLUTIONS = [
    pytest.param(nn.Conv2d(3, 4, 3), (3, 7, 6), id="plain"),
    pytest.param(nn.Conv2d(3, 4, 3, padding=1, bias=False), (3, 6, 6), id="padding, no bias"),
    pytest.param(nn.Conv2d(2, 3, 3, stride=2, padding=1), (2, 7, 8), id="stride"),
    pytest.param(nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0)), (2, 9, 8), id="non-square"),
    pytest.param(nn.Conv2d(2, 3, 3, dilation=2), (2, 8, 7), id="dilation"),
    pytest.param(nn.Conv2d(2, 4, 3, dilation=(2, 1), stride=(1, 2), padding=2), (2, 8, 7), id="dilation and stride"),
    pytest.param(nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 5, 5), id="groups"),
    pytest.param(nn.Conv2d(4, 8, 3, groups=4, padding=1, stride=2), (4, 6, 6), id="depthwise"),
    pytest.param(nn.Conv2d(5, 4, 1), (5, 4, 3), id="1x1"),
    pytest.param(nn.Conv2d(2, 3, 5, padding=2), (2, 6, 6), id="5x5"),
    pytest.param(nn.Conv2d(2, 3, 3, padding="same", dilation=2), (2, 6, 5), id="same"),
    pytest.param(nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 6, 5), id="same, asymmetric"),
    pytest.param(nn.Conv2d(2, 3, 3, padding="valid"), (2, 6, 5), id="valid"),
    pytest.param(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 6, 5), id="reflect"),
    pytest.param(nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"), (2, 6, 5), id="circular"),
    pytest.param(nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="replicate", stride=2), (2, 6, 5), id="replicate"),
    pytest.param(nn.Conv1d(3, 4, 5, padding=2), (3, 11), id="1-D"),
    pytest.param(nn.Conv1d(4, 4, 3, stride=2, dilation=2, groups=2), (4, 12), id="1-D stride dilation groups"),
    pytest.param(nn.Conv1d(2, 2, 4, padding=3, padding_mode="circular"), (2, 9), id="1-D circular"),
]
