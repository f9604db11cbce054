"""Which data sets count as neighbours."""

from enum import StrEnum


class Relation(StrEnum):
    """The neighbouring relation a guarantee speaks about.

    - ``ADD_OR_REMOVE_ONE``: the neighbour lacks one record, or has one more. A sum of records clipped to norm
      C changes by at most C.
    - ``REPLACE_ONE``: the neighbour has the same number of records and one of them is different. The old record
      leaves and the new one enters, so the sum changes by at most 2C.

    The noise of this library always has standard deviation ``noise_multiplier * sensitivity(relation)``: the
    same multiplier therefore means twice the noise under ``REPLACE_ONE``.
    """

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"
