"""Random numbers of a batch, given again sample by sample: each sample gets its own."""

import pytest
import torch
from torch.nn import functional as F

from spectral_dp.gradients.rules.draws import CannotRepeatError, Draws, GivenDraws


def _dropout(x):
    return F.dropout(x, 0.5, training=True)


def test_each_sample_gets_its_own_part_of_the_draw():
    x = torch.ones(4, 50)
    with Draws() as draws:
        together = _dropout(x)
    for sample in range(4):
        with GivenDraws(draws.drawn, 4, sample):
            alone = _dropout(x[sample : sample + 1])
        assert torch.equal(alone[0], together[sample])
    assert not torch.equal(_dropout(x), together), "the control, another draw, must differ"


def test_all_samples_side_by_side():
    x = torch.ones(3, 20)
    with Draws() as draws:
        together = torch.rand_like(x) + x
    with GivenDraws(draws.drawn, 3, None):
        assert torch.equal(torch.rand_like(x) + x, together)


@pytest.mark.parametrize("drawn_alone", [7, 2])
def test_another_number_of_random_numbers_is_refused(drawn_alone):
    with Draws() as draws:
        torch.rand(4 * 5)
    with pytest.raises(CannotRepeatError, match="another number"), GivenDraws(draws.drawn, 4, 0):
        torch.rand(drawn_alone)


def test_more_draws_than_in_the_batch_are_refused():
    with pytest.raises(CannotRepeatError, match="more random numbers"), GivenDraws([], 4, 0):
        torch.rand(3)


def test_numbers_that_are_mixed_with_data_are_refused():
    with pytest.raises(CannotRepeatError, match="inside of"), Draws():
        torch.multinomial(torch.ones(5), 2)
