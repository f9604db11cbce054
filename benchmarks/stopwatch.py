"""Where the time of a private step goes: a loop as users write it, through the engine and its Poisson loader."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine, SpectralConfig
from spectral_dp.gradients.model import RecordedBatch
from spectral_dp.mechanism.noise import NoiseSource

DELTA = 1e-6
_WARM_UP = 2  # steps that are not counted

Times = dict[str, float]


class CountingNoise(NoiseSource):
    """A source that knows how many numbers were asked of it, and how long they took."""

    def __init__(self, source: NoiseSource) -> None:
        self.source, self.is_private = source, source.is_private
        self.drawn, self.seconds = 0, 0.0

    def normal(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        began = perf_counter()
        found = self.source.normal(shape, dtype=dtype, device=device)
        self.drawn += found.numel()
        self.seconds += perf_counter() - began
        return found


class PrivateTraining:
    """A model in private training on random records, timed step by step.

    Attributes:
        parameters: How many numbers are trained.
        kept: How many coordinates are released of them.
        drawn: How many numbers each step drew from the noise source.
    """

    def __init__(self, model: nn.Module, dataset: TensorDataset, batch_size: int, spectral: SpectralConfig) -> None:
        self._engine = PrivacyEngine()
        self._model, self._optimizer, self._loader = self._engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(dataset, batch_size=batch_size),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            spectral=spectral,
            rehearsal=False,  # once a run, and not part of any step
        )
        self._noise = self._optimizer.noise = CountingNoise(self._optimizer.noise)
        gradients = self._optimizer.gradients
        self.parameters = sum(p.numel() for p in gradients.trained)
        self.kept = sum(gradients.zeros(p).numel() for p in gradients.trained)
        self.drawn: list[int] = []

    def run(self, steps: int) -> list[Times]:
        """The seconds of each part of each step; ``fixed`` is what does not depend on the batch."""
        batches: Iterator[Any] = itertools.chain.from_iterable(itertools.repeat(self._loader))
        return [self._step(batches) for _ in range(steps + _WARM_UP)][_WARM_UP:]

    def _step(self, batches: Iterator[Any]) -> Times:
        self._noise.drawn, self._noise.seconds = 0, 0.0
        times: defaultdict[str, float] = defaultdict(float)
        with _timed(times, "loader"):
            x, y = next(batches)
        with _timed(times, "forward and backward"):
            F.cross_entropy(self._model(x), y).backward()
        with ExitStack() as stack:
            for owner, name in ((RecordedBatch, "squared_norms"), (RecordedBatch, "clipped_sums")):
                stack.enter_context(_watched(owner, name, times))
            stack.enter_context(_watched(self._optimizer.original_optimizer, "step", times))
            with _timed(times, "private step"):
                self._optimizer.step()
        with _timed(times, "zero_grad"):
            self._optimizer.zero_grad()
        times["total"] = sum(times[k] for k in ("loader", "forward and backward", "private step", "zero_grad"))
        parts = ("squared_norms", "clipped_sums", "step")
        if missing := [part for part in parts if part not in times]:
            raise RuntimeError(f"the optimizer no longer calls {missing}: what is fixed cannot be told from the rest")
        times["fixed"] = times["private step"] - sum(times[part] for part in parts)
        times["noise"] = self._noise.seconds
        with _timed(times, "get_epsilon"):
            self._engine.get_epsilon(DELTA)
        self.drawn.append(self._noise.drawn)
        return dict(times)


@contextmanager
def _timed(times: defaultdict[str, float], name: str) -> Iterator[None]:
    began = perf_counter()
    yield
    times[name] += perf_counter() - began


@contextmanager
def _watched(owner: Any, name: str, times: defaultdict[str, float]) -> Iterator[None]:
    """Adds up how long the calls of a method take."""
    original = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        with _timed(times, name):
            return original(*args, **kwargs)

    with patch.object(owner, name, timed):
        yield
