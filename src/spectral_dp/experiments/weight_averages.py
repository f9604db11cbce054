"""Exponential moving averages of the weights over the steps of a run, with several decays at once.

    A <- decay A + (1 - decay) W     after every step

They are made of released weights, so they cost no privacy, and noise of single steps is averaged out of them. Which
decay is best depends on the learning rate and on the noise. So a run keeps any number of averages: that of its result,
and others to be compared with it on records that were left out of training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spectral_dp.experiments.settings import ResolvedSettings


class WeightAverages:
    """The averages of a model's weights, by decay.

    Args:
        model: The model, which is copied.
        settings: The settings of its run: ``ema_decay`` of the result, ``ema_candidates`` to compare with it.
    """

    def __init__(self, model: nn.Module, settings: ResolvedSettings) -> None:
        self._model, self._of_result = model, settings.ema_decay
        self._candidates: Sequence[float] = sorted({*settings.ema_candidates})
        kept = {settings.ema_decay, *settings.ema_candidates} - {0}
        self._averages = {d: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(d)) for d in sorted(kept)}

    def update(self) -> None:
        """Takes the weights of the last step in."""
        for average in self._averages.values():
            average.update_parameters(self._model)

    @property
    def result(self) -> nn.Module:
        """The model that the run is for: with averaged weights, or as it was trained."""
        return self._with_decay(self._of_result)

    def candidates(self) -> Iterator[tuple[float, nn.Module]]:
        """Yields the models to compare with each decay; that of decay 0 has the weights of the last step."""
        return ((decay, self._with_decay(decay)) for decay in self._candidates)

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages, for a checkpoint."""
        return {str(decay): average.state_dict() for decay, average in self._averages.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the averages of a checkpoint."""
        for decay, average in self._averages.items():
            average.load_state_dict(state[str(decay)])

    def _with_decay(self, decay: float) -> nn.Module:
        module: nn.Module = self._averages[decay].module if decay else self._model
        return module
