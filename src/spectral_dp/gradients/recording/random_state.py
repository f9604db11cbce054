"""The random generators as a forward pass found them, so that a second run can draw the very same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RandomState:
    """State of torch's default generators: that of the CPU, and that of the device a module is on.

    Generators that a module holds itself are not looked at, nor are those of NumPy and Python.

    Attributes:
        device: The device that the module is on.
        cpu: State of the generator of the CPU.
        of_device: State of that of the device; None on the CPU, and on devices whose generator cannot be read.
    """

    device: torch.device
    cpu: Tensor
    of_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Returns the current state."""
        return cls(device, torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def is_current(self) -> bool:
        """Returns whether nothing was drawn since."""
        now = RandomState.now(self.device)
        same_on_device = self.of_device is None or now.of_device is None or torch.equal(self.of_device, now.of_device)
        return torch.equal(self.cpu, now.cpu) and same_on_device

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draws from here on what was drawn from this state on; afterwards the generators are as they were before."""
        before = RandomState.now(self.device)
        self._restore()
        try:
            yield
        finally:
            before._restore()

    def _restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.of_device is not None:
            torch.cuda.set_rng_state(self.of_device, self.device)
