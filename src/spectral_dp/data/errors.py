"""What is said when data are missing, damaged or cannot be had."""


class DataError(ValueError):
    """Something is wrong with a data set or its files; the message names the cause and what to do."""
