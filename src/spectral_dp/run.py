"""One private run: what ``PrivacyEngine.make_private`` put together, how it is accounted for, saved and restored."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from spectral_dp.accounting import Ledger
from spectral_dp.budget import Budget
from spectral_dp.checkpoint import CheckpointError, require_equal
from spectral_dp.config import SpectralConfig, plain_repr
from spectral_dp.optimizer import PrivateOptimizer
from spectral_dp.sampling import CountingLoader, PoissonLoader


class Run:
    """A model's private optimizer and loader, with the ledger that their steps are entered in."""

    def __init__(
        self,
        ledger: Ledger,
        optimizer: PrivateOptimizer,
        loader: PoissonLoader | CountingLoader,
        sample_rate: float,
        spectral: SpectralConfig,
    ) -> None:
        self.ledger, self.optimizer, self.loader = ledger, optimizer, loader
        self.sample_rate, self.spectral = sample_rate, spectral
        self.plan: Budget | None = None

    def record(self) -> None:
        """Enters the coming release in the ledger, if the plan allows it."""
        if self.plan is not None:
            self.plan.check(self.ledger, self.optimizer.noise_multiplier, self.sample_rate)
        self.ledger.record(self.optimizer.noise_multiplier, self.sample_rate)

    def settings(self) -> dict[str, Any]:
        """Returns what must not change between a checkpoint and the run that resumes it."""
        optimizer = self.optimizer
        return {
            "clipping": plain_repr(optimizer.clipping),
            "noise_multiplier": optimizer.noise_multiplier,
            "expected_batch_size": float(optimizer.expected_batch_size),
            "sample_rate": self.sample_rate,
            "relation": str(optimizer.relation),
            "views": optimizer.views,
            "loss_reduction": optimizer.loss_reduction,
            **{f"spectral.{name}": value for name, value in self.spectral.describe().items()},
        }

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns model, optimizer, ledger, filters, sampler position, noise stream (if seeded) and settings."""
        return {
            "module": module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ledger": self.ledger.state_dict(),
            "settings": self.settings(),
            "steps": self.optimizer.steps,
            "steps_before": self.ledger.steps - self.optimizer.steps,  # of earlier runs on the same ledger
            "filters": self.optimizer.gradients.filter_state(),
            "sampler": self.loader.state_dict() if isinstance(self.loader, PoissonLoader) else {},
            "noise": self.optimizer.noise.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Restores :meth:`state_dict`; if anything does not fit, nothing is changed."""
        require_equal(state["settings"], self.settings())
        ledger = self._matching_ledger(state)
        mine = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        require_equal({name: tuple(value.shape) for name, value in state["module"].items()}, mine)
        before = copy.deepcopy(self.state_dict(module))
        try:
            self._load(state, module)
        except Exception:
            self._load(before, module)
            raise
        self.ledger = ledger

    def _load(self, state: Mapping[str, Any], module: nn.Module) -> None:
        module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.gradients.load_filter_state(state["filters"])
        self.optimizer.resume(state["steps"])
        self.optimizer.noise.load_state_dict(state["noise"])
        if isinstance(self.loader, PoissonLoader):
            self.loader.load_state_dict(state["sampler"])

    def _matching_ledger(self, state: Mapping[str, Any]) -> Ledger:
        try:
            ledger = Ledger.from_state_dict(state["ledger"])
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        steps, relation = state["steps_before"] + state["steps"], self.ledger.relation
        if ledger.steps != steps or ledger.relation != relation:
            raise CheckpointError(
                f"the ledger lists {ledger.steps} steps under {ledger.relation}, but {steps} were made under "
                f"{relation}: the checkpoint was tampered with"
            )
        if self.ledger.steps and self.ledger != ledger:
            raise CheckpointError(
                f"this engine has run {self.ledger.steps} steps and the checkpoint is from step {ledger.steps}: "
                "loading it would forget what they released. If nobody saw it, resume with a new engine"
            )
        return ledger
