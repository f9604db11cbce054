"""A trial run of a model on a few samples, to learn which layers and operations see rows of samples.

The trial runs the model twice without gradients, in evaluation mode and on copies: on up to three samples, and without
the first of these. Everything that depends on a watched layer or on a parameter that a module holds itself is noted in
the order in which it happens; comparing the two runs tells what is shared by the samples and what has rows of them (see
``samples.py``). What was learnt is about the *code* of the model, so it holds for later batches of other sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from spectral_dp.gradients.recording.samples import Relation, relation, relation_of_lengths
from spectral_dp.gradients.recording.shared import Operation, Shared
from spectral_dp.gradients.recording.state import Keepsake

#: How many samples are run, at most.
SAMPLES = 3


class Meeting(NamedTuple):
    """What is known of an operation with shared tensors.

    Attributes:
        relation: How its results belong to the samples.
        batched: Which of its arguments, flattened, have rows of samples.
    """

    relation: Relation
    batched: tuple[bool, ...]


class _Entry(NamedTuple):
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
        self.entries: list[_Entry] = []

    def seed(self, name: str, origin: int, value: Tensor, rows: Tensor | None = None) -> Shared:
        """Notes a layer's output or a held parameter, and returns it so that what depends on it is noted too.

        Args:
            name: For messages.
            origin: Of the value.
            value: The output or parameter.
            rows: What is compared in its place, where samples are not in its first dimension.
        """
        with torch._C.DisableTorchFunctionSubclass():
            value = value.detach().as_subclass(Tensor)
            compared = value if rows is None else rows.detach().as_subclass(Tensor)
            self.entries.append(_Entry(name, origin, (), (), [compared.clone()]))
        return self._noted(value)

    def apply(self, operation: Operation) -> Any:
        """Does an operation and notes it."""
        shapes = tuple(tuple(v.shape) if isinstance(v, Tensor) else None for v in operation.leaves)
        made_of = tuple(v.origin if isinstance(v, Shared) else None for v in operation.leaves)
        out = operation.plain()
        results = [v for v in tree_leaves(out) if isinstance(v, Tensor)]
        if not results:
            return out
        self.entries.append(_Entry(operation.name, None, made_of, shapes, [v.detach().clone() for v in results]))
        return tree_map(lambda v: self._noted(v) if isinstance(v, Tensor) and v.is_floating_point() else v, out)

    def _noted(self, value: Tensor) -> Shared:
        return Shared.make(value, value, len(self.entries) - 1, self)


class Knowledge:
    """What trials have shown of a model.

    Attributes:
        layers: How the output of a layer belongs to the samples, by its origin; None where a trial did not meet it.
        operations: The same of operations, by their origins.
        meets: An operation in which samples seem to meet or change places, if any.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Relation | None] = {}
        self.operations: dict[int, Meeting] = {}
        self.meets: str | None = None

    def learn(self, whole: Trial, rest: Trial, samples: int) -> None:
        """Compares a run on some samples with one without the first of them."""
        origins: list[int | None] = []  # of each entry that is shared
        numbers: Counter[int] = Counter()
        results = [t for entry in whole.entries for t in entry.results if t.is_floating_point()]
        precision = max((torch.finfo(t.dtype).eps for t in results), default=0.0)
        for ours, theirs in zip(whole.entries, rest.entries, strict=False):
            if (ours.name, ours.seed, ours.made_of) != (theirs.name, theirs.seed, theirs.made_of):
                return  # from here on, the number of samples decides what is done
            found = [relation(a, b, samples, precision) for a, b in zip(ours.results, theirs.results, strict=False)]
            how = found[0] if len(set(found)) == 1 and len(ours.results) == len(theirs.results) else "unknown"
            lengths = [t.shape[0] if t.ndim else 0 for t in (ours.results[0], theirs.results[0])]
            pairs = zip(found, ours.results, theirs.results, strict=False)
            if any(f == "unknown" and [len(t) for t in ts if t.ndim] == [samples, samples - 1] for f, *ts in pairs):
                self.meets = self.meets or ours.name  # each by itself: the states of an LSTM have samples elsewhere
            if ours.seed is not None:
                if how == "unknown" and lengths == [samples, samples - 1]:
                    how = "rows"  # one of each sample, whatever else they do
                self.layers[ours.seed] = how
                origins.append(ours.seed if how == "shared" else None)
                continue
            shared = [None if entry is None else origins[entry] for entry in ours.made_of]
            if all(origin is None for origin in shared):  # an ordinary operation, which nobody will ask about
                origins.append(None)
                continue
            arguments = [
                relation_of_lengths(a, b, samples) if a is not None and b is not None and origin is None else "shared"
                for a, b, origin in zip(ours.shapes, theirs.shapes, shared, strict=True)
            ]
            how = "unknown" if "unknown" in arguments else how
            origin = numbered(numbers, ours.name, [o for o in shared if o is not None])
            self.operations[origin] = Meeting(how, tuple(a == "rows" for a in arguments))
            origins.append(origin if how == "shared" else None)


def numbered(numbers: Counter[int], name: str, origins: list[int]) -> int:
    """A number for the next operation of this name on these: the same in every forward pass of the same code."""
    what = hash((name, *origins))
    numbers[what] += 1
    return hash((what, numbers[what]))


@contextmanager
def without_trace(root: nn.Module) -> Iterator[None]:
    """Runs of a module within leave nothing behind, draw no random numbers of others, and are in evaluation mode."""
    keepsake = Keepsake(root)
    modes = [(module, module.training) for module in root.modules()]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    is_fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # it would not call the layers of a transformer
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            for module, _ in modes:
                module.training = False
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        for module, training in modes:
            module.training = training
        keepsake.restore()


def run_both(run: Callable[[slice], Trial], samples: int, knowledge: Knowledge) -> None:
    """Runs some samples, and these without the first, and learns from it."""
    few = min(SAMPLES, samples)
    runs: list[Trial] = []
    for rows in (slice(0, few), slice(1, few)):
        torch.default_generator.manual_seed(0)  # what is drawn for all samples is the same in both
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        runs.append(run(rows))
    whole, rest = runs
    knowledge.learn(whole, rest, few)
