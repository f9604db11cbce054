"""The methods of the engine that save and restore its run, under the names of Opacus."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from spectral_dp.training import checkpoint
from spectral_dp.training.distributed.ranks import Ranks, of_first
from spectral_dp.training.optimizer import PrivateOptimizer
from spectral_dp.training.run import Run
from spectral_dp.training.schedulers import Scheduler, require_same_schedulers, restore_schedulers, scheduler_states


class EngineCheckpoints:
    """A part of :class:`~spectral_dp.training.engine.PrivacyEngine`: checkpoints of the run that it made last."""

    _run: Run | None = None
    _ranks: Ranks | None = None  # the processes that train together, if there are several

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: PrivateOptimizer | None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
        noise_scheduler: Scheduler | None = None,
        grad_clip_scheduler: Scheduler | None = None,
        module_state_dict_kwargs: Mapping[str, Any] | None = None,
        torch_save_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves model, optimizer, ledger, filters, sampler position and privacy settings in one file, atomically.

        If a logical step is not complete, its sums are not saved, because they carry no noise yet. The resumed run
        draws that step again. If several processes train together, rank 0 writes the file, and the others do nothing.

        Args:
            path: The file to write.
            module: The model that ``make_private`` returned.
            optimizer: The optimizer that ``make_private`` returned. It can be left out; if given, it is checked.
            checkpoint_dict: Further values to save, such as the ``state_dict`` of a learning-rate scheduler. They must
                be tensors or plain types.
            noise_scheduler: A scheduler of ``optimizer.noise_multiplier``, whose state is saved.
            grad_clip_scheduler: A scheduler of ``optimizer.max_grad_norm``, whose state is saved.
            module_state_dict_kwargs: Arguments for ``module.state_dict``.
            torch_save_kwargs: Arguments for ``torch.save``.

        Raises:
            ValueError: If the model, the optimizer or a scheduler belongs to another run.
        """
        run = self._require_run()
        run.require_own(module, optimizer)
        if self._ranks is not None and not self._ranks.is_first:
            return
        schedulers = {"noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
        state = run.state_dict(module) | {"schedulers": scheduler_states(schedulers, run.optimizer)}
        state["extra"] = dict(checkpoint_dict or {})
        if module_state_dict_kwargs:
            state["module"] = module.state_dict(**module_state_dict_kwargs)
        checkpoint.save(state, path, **(torch_save_kwargs or {}))

    def load_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizer: PrivateOptimizer | None = None,
        noise_scheduler: Scheduler | None = None,
        grad_clip_scheduler: Scheduler | None = None,
        torch_load_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Restores a checkpoint into a run that was made private with the same settings.

        Call it right after ``make_private``. Noise multiplier and clipping bounds continue with their last values.
        :class:`~spectral_dp.training.run.Run` states what is guaranteed, and what a file cannot show. If several
        processes train together, all of them call it, and rank 0 reads the file for all. There may be more or fewer of
        them than when it was saved.

        Args:
            path: The file that :meth:`save_checkpoint` wrote.
            module: The model that ``make_private`` returned.
            optimizer: The optimizer that ``make_private`` returned. It can be left out; if given, it is checked.
            noise_scheduler: The scheduler to restore, made for the optimizer of this run. It must be given if one was
                saved.
            grad_clip_scheduler: The same for the scheduler of the clipping bound.
            torch_load_kwargs: Arguments for ``torch.load``.

        Returns:
            The ``checkpoint_dict`` that was saved.

        Raises:
            CheckpointError: If the file is damaged or edited, has other settings or schedulers, or does not continue
                the steps that this engine has run. Nothing is changed then.
            ValueError: If the model, the optimizer or a scheduler belongs to another run, or the loader differs.
            RuntimeError: If a logical step is not complete.
        """
        run = self._require_run()
        run.require_own(module, optimizer)
        schedulers = {"noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
        state = of_first(self._ranks, lambda: checkpoint.load(path, **(torch_load_kwargs or {})), "load_checkpoint")
        saved = state.get("schedulers", {})
        require_same_schedulers(saved, scheduler_states(schedulers, run.optimizer))
        run.load_state_dict(state, module)
        restore_schedulers(schedulers, saved)
        return dict(state["extra"])

    def state_dict(self, *, module: nn.Module) -> dict[str, Any]:
        """Returns what :meth:`save_checkpoint` saves without schedulers, sealed, for a checkpoint that others write.

        The tensors are the model's own and not copied: write them before the next step.
        """
        run = self._require_run()
        run.require_own(module, None)
        return checkpoint.sealed(run.state_dict(module) | {"schedulers": {}, "extra": {}})

    def load_state_dict(self, state: Mapping[str, Any], *, module: nn.Module) -> None:
        """Restores :meth:`state_dict`, under the same conditions as :meth:`load_checkpoint`."""
        run = self._require_run()
        run.require_own(module, None)
        run.load_state_dict(checkpoint.unsealed(state, "this state"), module)

    def _require_run(self) -> Run:
        if self._run is None:
            raise RuntimeError("nothing is private yet: call make_private or make_private_with_epsilon first")
        return self._run
