"""One private run: the parts that ``PrivacyEngine.make_private`` put together, saved and restored as a whole."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from spectral_dp.accounting import Ledger
from spectral_dp.training.bookkeeping import Bookkeeping
from spectral_dp.training.checkpoint import CheckpointError, require_equal
from spectral_dp.training.config import SpectralConfig, plain_repr
from spectral_dp.training.optimizer import PrivateOptimizer
from spectral_dp.training.sampling import CountingLoader, PoissonLoader

#: The ledgers of all runs of this process. They stay when an engine is gone, because its releases stay released.
_LEDGERS: list[Ledger] = []


class Run:
    """The private optimizer and loader of a model, with the ledger of their steps.

    Formal guarantee. A checkpoint is refused unless it continues the run that loads it:

    * Loading never removes steps from a ledger. A ledger that lists steps accepts only a checkpoint whose ledger begins
      with exactly these steps.
    * All parts of a checkpoint were saved together and are unchanged (see the seal in ``checkpoint.py``).

    =====================================================  ===============================================
    Checkpoint, loaded into a run that has made steps      What happens
    =====================================================  ===============================================
    one of the same run, with further steps                loaded
    an earlier one of the same run                         refused
    one of another run                                     refused, however many steps it lists
    one of another continuation of the same checkpoint     refused, however many steps it lists
    one with other settings, or other parameter shapes     refused
    any, in the middle of a logical step                   refused
    =====================================================  ===============================================

    A file cannot show how far a run went *after* its last checkpoint. Two kinds of steps are therefore missing from the
    ledger of a resumed run: those that a killed process released but did not save, and those of a second process that
    resumed from the same file. Within one process a warning is given. The guarantee does not hold against somebody who
    can write to the disk.

    Args:
        books: The bookkeeping of the run, with its ledger.
        optimizer: The private optimizer.
        loader: The private loader.
        spectral: What is released of each layer.
    """

    def __init__(
        self,
        books: Bookkeeping,
        optimizer: PrivateOptimizer,
        loader: PoissonLoader | CountingLoader,
        spectral: SpectralConfig,
    ) -> None:
        self.books, self.ledger = books, books.ledger
        self.optimizer, self.loader, self.spectral = optimizer, loader, spectral
        self._begun_with = {
            "clipping": plain_repr(optimizer.clipping),
            "noise_multiplier": optimizer.noise_multiplier,
        }
        loader.stop_when = self.must_stop
        _LEDGERS.append(self.ledger)

    def must_stop(self) -> bool:
        """Returns whether the budget allows no further step. The loader asks before it draws one."""
        return self.books.must_stop(self.optimizer.noise_multiplier)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that must be the same in a checkpoint and in the run that resumes it."""
        optimizer = self.optimizer
        return {
            **self._begun_with,  # a schedule may have changed them since
            "expected_batch_size": float(optimizer.expected_batch_size),
            "sample_rate": self.books.sample_rate,
            "relation": str(optimizer.relation),
            "views": optimizer.views,
            "loss_reduction": optimizer.loss_reduction,
            **{f"spectral.{name}": value for name, value in self.spectral.describe().items()},
        }

    def require_own(self, module: nn.Module, optimizer: PrivateOptimizer | None) -> None:
        """Raises ``ValueError`` unless the model, and the optimizer if given, belong to this run."""
        if optimizer is not None and optimizer is not self.optimizer:
            raise ValueError(
                "that is not the optimizer that make_private returned last: a checkpoint would mix two runs. Leave it "
                "out, or give that one"
            )
        if not set(self.optimizer.gradients.parameters) <= set(module.parameters()):
            raise ValueError(
                "that is not the model that was made private last: a checkpoint would mix two runs. Give the model "
                "that make_private returned; put the weights of another one, such as an average, into checkpoint_dict"
            )

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the state of model, optimizer, ledger, filters, sampler, noise, settings and schedule."""
        return {
            "module": module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ledger": self.ledger.state_dict(),
            "settings": self.settings(),
            "schedule": {
                "noise_multiplier": self.optimizer.noise_multiplier,
                "max_grad_norm": getattr(self.optimizer, "max_grad_norm", None),
                "clipping": plain_repr(self.optimizer.clipping),
            },
            "steps": self.optimizer.steps,
            "steps_before": self.ledger.steps - self.optimizer.steps,  # of earlier runs on the same ledger
            "filters": self.optimizer.gradients.filter_state(),
            "sampler": self.loader.state_dict() if isinstance(self.loader, PoissonLoader) else {},
            "noise": self.optimizer.noise.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], module: nn.Module) -> None:
        """Restores what :meth:`state_dict` returned. If anything does not fit, raises an error and changes nothing."""
        self._require_between_steps()
        if missing := self.state_dict(module).keys() - state.keys():
            raise CheckpointError(
                f"the checkpoint has no {', '.join(sorted(missing))}: it was not saved by PrivacyEngine.save_checkpoint"
            )
        require_equal(state["settings"], self.settings())
        self._check_ledger(state)
        mine = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        require_equal({name: tuple(value.shape) for name, value in state["module"].items()}, mine)
        self.optimizer.gradients.discard()  # of a backward pass that was not stepped
        before = copy.deepcopy(self.state_dict(module))
        try:
            self._load(state, module)
        except Exception:
            self._load(before, module)
            raise
        self.ledger.load_state_dict(state["ledger"])  # in place: all references to the ledger see it
        self.loader.current = None  # a batch that was drawn before belongs to no step
        self._warn_of_other_continuations()

    def _load(self, state: Mapping[str, Any], module: nn.Module) -> None:
        module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.gradients.load_filter_state(state["filters"])
        self.optimizer.resume(state["steps"])
        self.optimizer.noise.load_state_dict(state["noise"])
        self._load_schedule(state["schedule"])
        if isinstance(self.loader, PoissonLoader):
            self.loader.load_state_dict(state["sampler"])

    def _load_schedule(self, schedule: Mapping[str, Any]) -> None:
        """Restores the last noise multiplier and clipping bounds, which a schedule may have changed."""
        self.optimizer.noise_multiplier = schedule["noise_multiplier"]
        if schedule["max_grad_norm"] not in (None, getattr(self.optimizer, "max_grad_norm", None)):
            self.optimizer.max_grad_norm = schedule["max_grad_norm"]
        require_equal({"clipping": schedule["clipping"]}, {"clipping": plain_repr(self.optimizer.clipping)})

    def _require_between_steps(self) -> None:
        """Raises ``RuntimeError`` within a logical step, because loading would drop the sums of its first batches."""
        current = self.loader.current
        is_open = current is not None and not current.is_last and not current.is_rehearsal
        if self.optimizer.is_within_step or is_open:
            raise RuntimeError(
                "a checkpoint cannot be loaded in the middle of a logical step: the rest of it would be released as if "
                "it were a whole one. Load it right after make_private, before batches are drawn"
            )

    def _check_ledger(self, state: Mapping[str, Any]) -> None:
        trial = copy.deepcopy(self.ledger)
        try:
            trial.load_state_dict(state["ledger"])
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if trial.steps != (steps := state["steps_before"] + state["steps"]):
            raise CheckpointError(
                f"the ledger lists {trial.steps} steps, but {steps} were made: the checkpoint was put together by hand"
            )

    def _warn_of_other_continuations(self) -> None:
        """Warns if another engine of this process has made steps of the same run that the ledger does not list."""
        same_run = [other for other in _LEDGERS if other.identity == self.ledger.identity]
        others = [other for other in same_run if not self.ledger.continues(other)]
        if others:
            warnings.warn(
                f"this process has made steps of the same run that the checkpoint of step {self.ledger.steps} does not "
                f"list: another engine is at step {max(other.steps for other in others)}. If anybody saw what these "
                "released (weights, an evaluation), more has been spent than get_epsilon will say",
                stacklevel=4,
            )
