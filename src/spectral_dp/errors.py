"""The base class of the package's own errors."""


class SpectralDPError(Exception):
    """What this package raises on its own account; catch it to catch them all.

    Every error class of the package derives from this one and from the builtin class that describes it, so that
    ``except ValueError`` and ``except RuntimeError`` go on to work. Plain wrong arguments are a plain ``ValueError``
    or ``TypeError``, as everywhere in Python.

    >>> from spectral_dp import BudgetExhausted
    >>> issubclass(BudgetExhausted, SpectralDPError), issubclass(BudgetExhausted, RuntimeError)
    (True, True)
    """
