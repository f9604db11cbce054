"""Figures that someone copies from a table must still be true."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spectral_dp.experiments.rounding import rounded_up


@given(st.floats(1e-6, 1e6), st.integers(1, 8))
def test_never_less_than_the_number_and_by_less_than_a_digit_more(value, digits):
    shown = Fraction(rounded_up(value, digits))
    assert shown >= Fraction(repr(value))
    assert shown <= Fraction(repr(value)) * (1 + Fraction(1, 10 ** (digits - 1)))


@pytest.mark.parametrize(("value", "shown"), [(2.0, "2"), (1.00001, "1.001"), (0.0, "0"), (float("inf"), "inf")])
def test_what_is_shown(value, shown):
    assert rounded_up(value) == shown


def test_control_rounding_to_the_nearest_would_be_less():
    assert float(f"{1.00001:.4g}") < 1.00001 <= float(rounded_up(1.00001))
