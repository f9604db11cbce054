"""What stands in the place of a class of a package that is not installed."""

from __future__ import annotations

from typing import Any


def stand_in(package: str, error: ImportError) -> type:
    """Returns a base class whose subclasses can be defined, but not used: making one says what to install.

    Args:
        package: The package that is missing, which is also the name of the extra.
        error: The error that importing it raised.
    """

    class Missing:
        def __new__(cls, *_: Any, **__: Any) -> Any:
            raise ImportError(
                f"{cls.__name__} needs {package}, which cannot be imported: pip install 'spectral-dp[{package}]'"
            ) from error

    return Missing
