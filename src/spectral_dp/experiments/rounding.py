"""Numbers as people read them: rounded to the private side, and times."""

from decimal import ROUND_CEILING, Context


def rounded_up(value: float, digits: int = 4) -> str:
    """Returns a number to so many digits, never less than it is: what someone copies from a table is still true.

    >>> rounded_up(1.99999), rounded_up(0.123412), rounded_up(123.4561), rounded_up(float("inf"))
    ('2', '0.1235', '123.5', 'inf')
    """
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(value)):.{digits}g}"


def duration(seconds: float) -> str:
    """Returns a time in the two units that tell most.

    >>> duration(12.34), duration(75), duration(7260)
    ('12.3 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
