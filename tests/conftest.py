"""Shared set-up: a reproducible torch on one thread."""

import pytest
import torch
from hypothesis import settings

# The tests are many tiny operations: on several threads they spend their time waiting for each other.
torch.set_num_threads(1)

# Where a test does not say how many examples it needs, so many: it is run often, and each time with others.
settings.register_profile("often", max_examples=40)
settings.load_profile("often")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
