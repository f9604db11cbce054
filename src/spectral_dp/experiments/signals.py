"""Other signal handlers for a while."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handled_by(handler: Callable[[int, Any], Any], *numbers: signal.Signals) -> Iterator[None]:
    """Handles signals by ``handler`` within a ``with`` block, and as before afterwards.

    Only the main thread of Python can handle signals. In any other thread nothing happens.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
