"""Shared set-up: a reproducible torch, and the noise doubles of the privacy checks."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
