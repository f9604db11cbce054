"""A private run as a trainer of another package sees it: one batch for each logical step, and a plan for so many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from spectral_dp.accounting import warn_if_delta_too_large
from spectral_dp.training.engine import PrivacyEngine
from spectral_dp.training.optimizer import PrivateOptimizer
from spectral_dp.training.sampling import CountingLoader, PhysicalBatch, PoissonLoader


class LogicalSteps:
    """Hands out the first physical batch of every logical step; :meth:`next_piece` gives the others of that step.

    The trainer sees ``len(loader)`` batches in an epoch and steps once for each, whatever was drawn. That a batch is
    one piece of several, and that some batches only rehearse, is between this class and who trains on them.

    Args:
        optimizer: The private optimizer.
        loader: The private loader.
        rehearse: Is given every batch of the rehearsal, to do with it what is done with a batch, up to the step.
        at_budget: Called when the iteration ends because the budget is spent.
    """

    def __init__(
        self,
        optimizer: PrivateOptimizer,
        loader: PoissonLoader | CountingLoader,
        rehearse: Callable[[Any], None],
        at_budget: Callable[[], None],
    ) -> None:
        self.optimizer, self.loader = optimizer, loader
        self._rehearse, self._at_budget = rehearse, at_budget
        self._pieces: Iterator[Any] = iter(())

    @property
    def dataset(self) -> Dataset[Any]:
        """The records."""
        return self.loader.dataset

    @property
    def current(self) -> PhysicalBatch:
        """Describes the physical batch that was handed out last."""
        assert self.loader.current is not None
        return self.loader.current

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._pieces = iter(self.loader)
        for batch in self._pieces:
            if self.current.is_rehearsal:
                self._rehearse(batch)
                self.optimizer.step()
                self.optimizer.zero_grad()
            else:
                yield batch
        if self.loader.stop_when():
            self._at_budget()

    def next_piece(self) -> Any:
        """Adds the batch at hand to the sum of its logical step, of which it is not the last; returns the next one."""
        assert not self.current.is_last
        self.optimizer.step()
        self.optimizer.zero_grad()
        return next(self._pieces)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where the run is stands in the checkpoint of the engine. Says that the loader can be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`state_dict`."""


def make_private(
    engine: PrivacyEngine,
    *,
    module: nn.Module,
    optimizer: Optimizer,
    data_loader: DataLoader[Any],
    target_epsilon: float | None,
    target_delta: float,
    noise_multiplier: float | None,
    epochs: float | None,
    **others: Any,
) -> tuple[PrivateOptimizer, PoissonLoader | CountingLoader]:
    """Returns the private optimizer and loader of a run with a budget, or with a given noise multiplier.

    A run with a budget stops there. A second run on an engine that has made steps gets the noise of the first, and
    stays within the same budget.
    """
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            f"give target_epsilon or noise_multiplier, one of them, got {target_epsilon} and {noise_multiplier}"
        )
    common: dict[str, Any] = {"module": module, "optimizer": optimizer, "data_loader": data_loader, **others}
    if target_epsilon is not None and engine.accountant.history:
        noise_multiplier = engine.accountant.history[-1].noise_multiplier
    if noise_multiplier is not None:
        warn_if_delta_too_large(target_delta, len(data_loader.dataset))  # type: ignore[arg-type]
        _, private, loader = engine.make_private(noise_multiplier=noise_multiplier, **common)
        return private, loader
    assert target_epsilon is not None
    if epochs is None:
        raise ValueError(
            "the noise for a target_epsilon depends on the number of steps, which is not limited: set the number of "
            "epochs or steps, or give a noise_multiplier"
        )
    _, private, loader = engine.make_private_with_epsilon(
        target_epsilon=target_epsilon, target_delta=target_delta, epochs=epochs, stop_at_budget=True, **common
    )
    return private, loader


def refuse_problems(what: str, problems: Mapping[str, tuple[bool, str]]) -> None:
    """Raises ``ValueError`` if a trainer is told to do what private training cannot do, with what to do instead.

    Args:
        what: What is refused, in words.
        problems: Each setting that may be a problem: whether it is one, and the remedy.
    """
    listed = [f"{name}: {remedy}" for name, (is_set, remedy) in problems.items() if is_set]
    if listed:
        raise ValueError("\n  - ".join([f"private training cannot do {what}:", *listed]))
