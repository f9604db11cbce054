"""Shared set-up: a reproducible torch on one thread."""

import pytest
import torch

# The tests are many tiny operations: on several threads they spend their time waiting for each other.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
