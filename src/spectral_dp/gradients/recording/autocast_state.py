"""Autocast as a forward pass found it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AutocastState(NamedTuple):
    """Whether autocast is on, and how, on the processor and on the accelerator.

    ``torch.autocast`` cannot be entered again while it is entered: what it is to restore is then overwritten. A module
    whose ``forward`` is decorated by it (as accelerate does) would leave it on for good after a trial run, which calls
    the module while it is being called. So whoever runs a trial restores the state when the outer call has ended.
    """

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    is_cached: bool

    @classmethod
    def now(cls) -> AutocastState:
        """The state at the moment."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ("cpu",) if accelerator is None or accelerator.type == "cpu" else ("cpu", accelerator.type)
        devices = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(devices, torch.is_autocast_cache_enabled())

    def restore(self) -> None:
        """Makes it the state again."""
        for kind, is_on, dtype in self.devices:
            torch.set_autocast_enabled(kind, is_on)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.is_cached)
