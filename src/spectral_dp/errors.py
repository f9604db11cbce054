"""The base class of the package's own errors."""


class SpectralDPError(Exception):
    """The base class of all error classes of this package.

    Each of them also derives from the builtin class that describes it, so ``except ValueError`` and
    ``except RuntimeError`` work as well. Wrong arguments raise a plain ``ValueError`` or ``TypeError``.

    >>> from spectral_dp import BudgetExhausted
    >>> issubclass(BudgetExhausted, SpectralDPError), issubclass(BudgetExhausted, RuntimeError)
    (True, True)
    """
