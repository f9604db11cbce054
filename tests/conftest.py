"""Shared set-up: a reproducible torch on one thread."""

import gc

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


@pytest.fixture(scope="session")
def processes():
    """Real processes, which all tests share. The first test that needs so many starts them."""
    from tests.support.processes import Processes  # not above: pytest-xdist's first process only hands out tests

    pool = Processes()
    yield pool
    pool.stop()


def pytest_collection_finish():
    # What importing and collecting made stays until the end: half a million objects that every full collection of
    # garbage, and the rehearsal's search for schedulers, would otherwise look at again.
    gc.collect()
    gc.freeze()
