"""What a user has written, found by an import path ``package.module:name``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def imported_factory(path: str, what: str) -> Callable[..., Any]:
    """Returns the function or class at an import path, which makes a ``what``.

    Modules in the current directory are found, as by ``python -m``: one's own usually lie where one works.

    Raises:
        ValueError: If there is nothing there.
        TypeError: If what is there cannot be called.
    """
    module_name, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot import {what} {path!r} ({error}): give it as package.module:factory") from error
    if not callable(factory):
        raise TypeError(f"{path} is a {type(factory).__name__}, not a function or class that makes a {what}")
    return factory
