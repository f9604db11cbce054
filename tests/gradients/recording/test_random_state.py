"""Generators as a forward pass found them: a second run draws the same, and nothing else is moved."""

import torch

from spectral_dp.gradients.recording.random_state import RandomState

CPU = torch.device("cpu")


def test_a_second_run_draws_the_same_and_leaves_the_generator_where_it_was():
    state = RandomState.now(CPU)
    first = torch.rand(5)
    later = torch.get_rng_state()
    with state.replayed():
        again = torch.rand(5)
        torch.rand(100)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), later)
    assert not torch.equal(first, torch.rand(5)), "the control, without a replay, must differ"


def test_it_is_current_until_something_is_drawn():
    state = RandomState.now(CPU)
    assert state.is_current()
    torch.rand(1)
    assert not state.is_current()


def test_the_generator_is_put_back_after_an_error():
    state = RandomState.now(CPU)
    torch.rand(3)
    later = torch.get_rng_state()
    try:
        with state.replayed():
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.get_rng_state(), later)
