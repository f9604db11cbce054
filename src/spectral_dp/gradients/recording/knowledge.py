"""What trial runs have shown of a model: how layers and operations belong to the samples, and in which form.

A conclusion of a trial is used for later batches. It holds for them only if they do the same, so it is kept together
with the form in which the trial met it: the number of dimensions, how many rows each sample has, which arguments are
shared. A pass that does something else (twice as many rows in training mode, a layer that is given another thing) finds
nothing that fits. It is then tried out itself, and refused if its own trial does not fit either.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

from spectral_dp.gradients.recording.samples import Relation, relation, relation_of_lengths
from spectral_dp.gradients.recording.shared import Operation, Shared
from spectral_dp.gradients.recording.trial import Trial


class Fact(NamedTuple):
    """How a tensor belongs to the samples, and what it looks like.

    Attributes:
        relation: Whether samples share it, or it has rows of them.
        rows: How many rows each sample has; zero where samples share it.
        dims: How many dimensions the tensor has.
    """

    relation: Relation
    rows: int
    dims: int

    @classmethod
    def of(cls, how: Relation, tensor: Tensor, samples: int) -> Fact:
        """The fact that a trial has shown of a tensor."""
        return cls(how, len(tensor) // samples if how == "rows" else 0, tensor.ndim)

    def fits(self, tensor: Tensor, samples: int) -> bool:
        """Returns whether a tensor of a batch has the same form."""
        return tensor.ndim == self.dims and (self.rows == 0 or len(tensor) == self.rows * samples)


class Meeting(NamedTuple):
    """What is known of an operation with shared tensors.

    Attributes:
        relation: How its results belong to the samples.
        arguments: What is known of each of its arguments, flattened; None for one that is no tensor.
        shared: Which of the arguments are made of what samples share.
    """

    relation: Relation
    arguments: tuple[Fact | None, ...]
    shared: tuple[bool, ...]

    @property
    def batched(self) -> tuple[bool, ...]:
        """Which of the arguments have rows of samples."""
        return tuple(fact is not None and fact.relation == "rows" for fact in self.arguments)

    def fits(self, operation: Operation, samples: int) -> bool:
        """Returns whether the arguments of an operation have the same form."""
        leaves = operation.leaves
        if self.shared != tuple(isinstance(v, Shared) for v in leaves):
            return False
        return all(
            fact.fits(v, samples) if isinstance(v, Tensor) and fact is not None else not isinstance(v, Tensor)
            for v, fact in zip(leaves, self.arguments, strict=True)
        )


class Knowledge:
    """What trials have shown of a model.

    Attributes:
        layers: What is known of the output of a layer, by its origin. Nothing, where a trial has met it and could not
            tell.
        operations: The same of operations, by their origins.
        meets: An operation in which samples seem to meet or change places, if any.
        missed: The origins of layers that trials did not meet, so that they need not be tried in every pass.
    """

    def __init__(self) -> None:
        self.layers: dict[int, set[Fact]] = {}
        self.operations: dict[int, set[Meeting]] = {}
        self.meets: str | None = None
        self.missed: set[int] = set()

    def of_layer(self, origin: int, output: Tensor, samples: int) -> Relation | None:
        """Returns how the output of a layer belongs to the samples of a batch.

        Returns:
            ``"unknown"`` if trials have met the layer, but not in this form, or with different results. None if no
            trial has met it.
        """
        if origin not in self.layers:
            return None
        found = {fact.relation for fact in self.layers[origin] if fact.fits(output, samples)}
        return found.pop() if len(found) == 1 else "unknown"

    def of_operation(self, origin: int, operation: Operation, samples: int) -> Meeting | None:
        """Returns what is known of an operation; None if no trial has met it in this form, or trials disagree."""
        found = {m for m in self.operations.get(origin, ()) if m.fits(operation, samples)}
        return found.pop() if len(found) == 1 else None

    def update(self, other: Knowledge) -> None:
        """Adds what another trial has shown."""
        for origin, facts in other.layers.items():
            self.layers.setdefault(origin, set()).update(facts)
        for origin, meetings in other.operations.items():
            self.operations.setdefault(origin, set()).update(meetings)
        self.meets = self.meets or other.meets

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
                facts = self.layers.setdefault(ours.seed, set())
                if how != "unknown":
                    facts.add(Fact.of(how, ours.results[0], samples))
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
            forms = tuple(
                None if shape is None else Fact(a, shape[0] // samples if a == "rows" else 0, len(shape))
                for a, shape in zip(arguments, ours.shapes, strict=True)
            )
            meeting = Meeting(how, forms, tuple(o is not None for o in shared))
            self.operations.setdefault(origin, set()).add(meeting)
            origins.append(origin if how == "shared" else None)


def numbered(numbers: Counter[int], name: str, origins: list[int]) -> int:
    """Returns a number for the next operation of this name on these, the same in every pass of the same code."""
    what = hash((name, *origins))
    numbers[what] += 1
    return hash((what, numbers[what]))
