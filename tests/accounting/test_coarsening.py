"""Coarsening: fewer kinds of steps, as many steps, and never to the side that spends less."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectral_dp.accounting.coarsening import MAX_KINDS, _kind, cells_of, coarsened

kinds = st.tuples(st.floats(1e-4, 1e8), st.floats(1e-12, 1, exclude_max=True))


def _images(some, level):
    return [_kind(cell, level) for cell in cells_of(some, level)]


@given(kinds, st.integers(0, 20))
def test_a_kind_moves_to_less_noise_and_a_higher_rate_and_further_on_the_next_level(kind, level):
    """Catches rounding to the wrong side, and grids that do not nest."""
    (sigma, rate), (next_sigma, next_rate) = (_images([kind], level)[0], _images([kind], level + 1)[0])
    assert next_sigma <= sigma <= kind[0]
    assert kind[1] <= rate <= next_rate <= 1


@settings(deadline=None)
@given(st.dictionaries(kinds, st.integers(1, 10**6), max_size=300), kinds, st.integers(0, 3))
def test_steps_are_conserved_and_the_level_never_falls(counts, another, least):
    level, merged = coarsened(counts, least)
    assert len(merged) <= MAX_KINDS
    assert sum(merged.values()) == sum(counts.values())
    assert level >= least
    assert coarsened({**counts, another: 1}, least)[0] >= level


def test_few_kinds_stay_as_they_are():
    counts = {(1 + i / 100, 0.01): i + 1 for i in range(MAX_KINDS)}
    assert coarsened(counts) == (0, counts)
    assert coarsened({}) == (0, {})


def test_the_spacing_is_as_stated():
    """A schedule from one multiplier to half of it, at two rates: 1/64, and the rates stay."""
    level, merged = coarsened({(2 - i / 1000, (0.01, 0.02)[i % 2]): 1 for i in range(1000)})
    assert {rate for _, rate in merged} <= {0.01, 0.02}
    sigmas = sorted({sigma for sigma, _ in merged})
    steps = [math.log(b / a) for a, b in itertools.pairwise(sigmas)]
    assert steps == pytest.approx([1 / 64] * len(steps))
    assert level == 3
