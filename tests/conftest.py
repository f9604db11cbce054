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


@pytest.fixture
def few_batches(monkeypatch):
    """The neighbour audit tries fewer sizes of batches, for tests in which it is one line among others."""
    monkeypatch.setattr("spectral_dp.audit.checks.neighbours.SMALL", (0, 3))
    monkeypatch.setattr("spectral_dp.audit.checks.neighbours.LEAST_LARGEST", 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # What importing and collecting makes stays until the end: half a million objects. The garbage collector would look
    # at them again and again meanwhile, and at every full collection afterwards, as would the rehearsal's search for
    # schedulers.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)  # the usual 700 costs a twentieth of the time of the tests
