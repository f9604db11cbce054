"""The neighbouring relation: which pairs of data sets a privacy guarantee compares."""

from enum import StrEnum


class Relation(StrEnum):
    """The neighbouring relation for which a guarantee holds.

    - ``ADD_OR_REMOVE_ONE``: The neighbour has one record less or one record more. A sum of records that are clipped
      to norm C changes by at most C.
    - ``REPLACE_ONE``: The neighbour has the same number of records, and one of them is different. The old record
      leaves the sum and the new one enters it, so the sum changes by at most 2C.

    The noise of this library always has standard deviation ``noise_multiplier * sensitivity(relation)``. The same
    multiplier therefore means twice the noise under ``REPLACE_ONE``.
    """

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"
