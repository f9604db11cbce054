"""A trial run of a model on a few samples, to learn which layers and operations see rows of samples.

The trial runs the model twice without gradients, in evaluation mode and on copies: on up to three samples, and without
the first of these. Everything that depends on a watched layer or on a parameter that a module holds itself is noted in
the order in which it happens; comparing the two runs tells what is shared by the samples and what has rows of them (see
``samples.py`` and ``knowledge.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from spectral_dp.gradients.recording.shared import Operation, Shared
from spectral_dp.gradients.recording.state import Keepsake

#: How many samples are run, at most.
SAMPLES = 3


class Entry(NamedTuple):
    """Something that happened: a seed (a layer's output, a held parameter), or an operation on what came before."""

    name: str
    seed: int | None  # its origin
    made_of: tuple[int | None, ...]  # for each argument, the entry that it comes from
    shapes: tuple[tuple[int, ...] | None, ...]  # of each argument that is a tensor
    results: list[Tensor]


class Origins:
    """Numbers for what a forward pass begins with, the same in every pass of a root module."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._calls: Counter[nn.Module] = Counter()

    def of_call(self, module: nn.Module) -> int:
        """Of the output of the next call of a layer."""
        self._calls[module] += 1
        return hash((id(self._root), id(module), self._calls[module]))

    def of_parameter(self, module: nn.Module, name: str) -> int:
        """Of a parameter that a module holds itself."""
        return hash((id(self._root), id(module), name))


class Trial:
    """Notes what happens in one of the two runs."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self.entries: list[Entry] = []

    def seed(
        self, name: str, origin: int, value: Tensor, rows: Tensor | None = None, needs_gradient: bool = False
    ) -> Shared:
        """Notes a layer's output or a held parameter, and returns it so that what depends on it is noted too.

        Args:
            name: For messages.
            origin: Of the value.
            value: The output or parameter.
            rows: What is compared in its place, where samples are not in its first dimension.
            needs_gradient: Whether it says so of itself: model code may ask a parameter.
        """
        with torch._C.DisableTorchFunctionSubclass():
            value = value.as_subclass(Tensor)
            compared = value if rows is None else rows.as_subclass(Tensor)
            self.entries.append(Entry(name, origin, (), (), [compared.detach().clone()]))
            noted = self._noted(value)
            if needs_gradient:
                noted.requires_grad_()
            return noted

    def apply(self, operation: Operation) -> Any:
        """Does an operation and notes it."""
        shapes = tuple(tuple(v.shape) if isinstance(v, Tensor) else None for v in operation.leaves)
        made_of = tuple(v.origin if isinstance(v, Shared) else None for v in operation.leaves)
        out = operation.plain()
        results = [v for v in tree_leaves(out) if isinstance(v, Tensor)]
        if not results:
            return out
        self.entries.append(Entry(operation.name, None, made_of, shapes, [v.detach().clone() for v in results]))
        return tree_map(lambda v: self._noted(v) if isinstance(v, Tensor) and v.is_floating_point() else v, out)

    def _noted(self, value: Tensor) -> Shared:
        """A tensor that notes what is done with it; with its graph, as a model may compute gradients by itself."""
        with torch._C.DisableTorchFunctionSubclass():
            noted = value.as_subclass(Shared)
        noted.wide, noted.origin, noted.within = value, len(self.entries) - 1, self
        return noted


@contextmanager
def without_trace(root: nn.Module) -> Iterator[None]:
    """Runs of a module within leave nothing behind, draw no random numbers of others, and are in evaluation mode."""
    keepsake = Keepsake(root)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    is_fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it would not call the layers of a transformer
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            for module in root.modules():
                module.training = False
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        keepsake.restore()


def run_both(run: Callable[[slice], Trial], samples: int, learn: Callable[[Trial, Trial, int], None]) -> None:
    """Runs some samples, and these without the first, and lets somebody learn from it.

    Args:
        run: A function that runs the samples with these numbers.
        samples: How many samples there are; at least two.
        learn: A function that is called with both runs, and with the number of samples of the first.
    """
    few = min(SAMPLES, samples)
    runs = []
    for rows in (slice(0, few), slice(1, few)):
        torch.default_generator.manual_seed(0)  # what is drawn for all samples is the same in both
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        runs.append(run(rows))
    whole, rest = runs
    learn(whole, rest, few)
