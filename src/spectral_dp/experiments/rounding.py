"""Rounding that errs on the private side."""

from decimal import ROUND_CEILING, Context


def rounded_up(value: float, digits: int = 4) -> str:
    """Returns a number to so many digits, never less than it is: what someone copies from a table is still true.

    >>> rounded_up(1.99999), rounded_up(0.123412), rounded_up(123.4561), rounded_up(float("inf"))
    ('2', '0.1235', '123.5', 'inf')
    """
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value)):.{digits}g}"
