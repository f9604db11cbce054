"""Runs the user's own training loop on a few small batches and tests whether it treats records independently.

Differential privacy bounds what *one record* adds to a sum. Here this is true only if the gradient of a record does not
depend on other records or on their number. Neither a model nor a loss shows this by itself (examples that break it: a
mean over the batch, padding that is not masked, views in the wrong order, a mean over labels that are not ignored), and
only the user's loop knows the loss. So the loop is rehearsed before the first release: the loader gives it a few small
batches, ``optimizer.step()`` looks at the gradients without changing anything, and the state of everything is restored
afterwards. Nothing is released, so the rehearsal costs no budget.

Let ``S(X)`` be the sum over a batch ``X`` of the per-sample gradients, or of their directions (length one). The tests:

* **Other sizes, other places**: ``S(M + a) - S(M) = S(a + N) - S(N)`` for a record ``a`` and batches ``M``, ``N`` of
  different sizes and lengths. If records are treated independently, both sides are the contribution of ``a``. The
  test fails for every kind of coupling, for a loss that is a sum although a mean was announced, and for random
  numbers. Each pass has another seed, so that a loop that mixes records only sometimes (``if random() < 0.5``) does so
  in one of them.
* **Other mates**: ``S(a + M) - S(b + M) = S(a + N) - S(b + N)``, where all batches have the same shape and seed. Random
  numbers (dropout) are then the same at every place, so a difference means coupling. One exception: the number of
  random numbers that a record draws may depend on its contents. If that is possible, the test is repeated without
  dropout, and then only with records that draw equally many (see ``twins.py``).
* **The first test in evaluation mode**, if the first test failed and the second did not. If it passes now, the cause
  was dropout.
* **The same batch in another order**. If the order matters, there are random numbers that cannot be switched off. If
  they are drawn in the collation, twins ``a`` and ``b`` take the first place of batches of different sizes and lengths:
  if ``a`` gets the same random numbers in both, a difference means coupling. Otherwise sizes cannot be compared
  exactly, and only the scale of the loss is compared.

Every test uses new records, so that a unit that happens to be at its kink cannot make two tests fail. A passed
rehearsal is not a proof: a coupling that needs larger batches, special records or other weights is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from spectral_dp.errors import SpectralDPError
from spectral_dp.gradients.model import ModelGradients, RecordedBatch
from spectral_dp.gradients.recording.fingerprint import Fingerprint, held
from spectral_dp.training.optimizer import PrivateOptimizer
from spectral_dp.training.records import copied
from spectral_dp.training.rehearsal import aside
from spectral_dp.training.rehearsal.choice import Choice
from spectral_dp.training.rehearsal.explanation import cannot_tell, depends_on_mates, depends_on_size, wrong_reduction
from spectral_dp.training.rehearsal.observation import Observation, Sum, has_other_scale, mismatch, observe
from spectral_dp.training.rehearsal.trace import Meeting, Visit, first_difference, traced
from spectral_dp.training.rehearsal.twins import content, same_but_for_padding

#: Two ways to the same sum disagree if their relative difference is larger than this: in batches of the same shape,
#: where rounding is the same; and in batches of different shapes, where it may differ (at least UNITS ulps).
SAME_SHAPE, OTHER_SHAPE, UNITS = 1e-5, 2e-3, 8

_LARGE, _SMALL = 8, 3  # batch sizes: each pass has one of these, or one record less

# Seeds for which the first number that each global generator draws (between 0 and 1) is small, large, or in between, so
# that something that a loop does with some probability happens in one of the passes.
_SMALL_DRAW, _LARGE_DRAW, *_BETWEEN = 49521, 27206, 16609, 37943


Quiet: TypeAlias = Literal["none", "dropout", "all"]


class _Pass(NamedTuple):
    """One batch of the rehearsal.

    Attributes:
        records: The records of the batch.
        position: The position of the record to follow through the model, or None.
        seed: The seed of the global generators.
        quiet: Which modules are set to evaluation mode.
    """

    records: list[Any]
    position: int | None = None
    seed: int = _SMALL_DRAW
    quiet: Quiet = "none"


class _Drawn(NamedTuple):
    """Hashes of the global generators: after seeding, after the collation, and (seeded again) after the step."""

    seeded: int
    collated: int
    stepped: int


_BEGIN = _Pass([])

Result = TypeVar("Result")
Passes: TypeAlias = Generator[_Pass, Observation, Result]


class RehearsalError(SpectralDPError, RuntimeError):
    """Raised when the training loop does not treat records independently, or the loss is not as announced."""


class Rehearsal:
    """Rehearses the training loop around a private optimizer, once.

    Args:
        optimizer: The private optimizer. The rehearsal does not change it.
        size: The number of records.
        read: A function that returns the records with given indices.
        collate: A function that makes a batch of records.
        are_alike: Whether all records have the same shape, as torch's own ``collate_fn`` requires.
        with_empty_batch: Whether to rehearse an empty batch as well, because the run may draw one.
    """

    def __init__(
        self,
        optimizer: PrivateOptimizer,
        size: int,
        read: Callable[[Sequence[int]], list[Any]],
        collate: Callable[[list[Any]], Any],
        *,
        are_alike: bool = False,
        with_empty_batch: bool = False,
    ) -> None:
        self._optimizer, self._collate = optimizer, collate
        self._gradients: ModelGradients = optimizer.gradients
        self._are_alike = are_alike
        self._choose = partial(Choice, size, read, collate, are_alike=are_alike)
        self._fit_into(None)
        self._with_empty_batch = with_empty_batch
        self._schedulers: list[Any] | None = None
        self._observed: list[Observation] = []
        self._floor: float | None = None
        self._left_behind: list[tuple[Fingerprint, set[str]]] = []
        self._traces: list[list[Visit]] = []
        self._contents: list[list[Any]] = []
        self._drawn: list[_Drawn] = []
        self._collation_draws = False
        self._needs_twins = False
        self._script = self._procedure()
        self._next: _Pass | None = _BEGIN
        self._failure: RehearsalError | None = None
        self._open = ExitStack()  # what must be restored
        optimizer.rehearsal = self._observe

    def batches(self, max_batch_size: int | None = None) -> Iterator[tuple[int, Any]]:
        """Yields the size and the content of each batch of the rehearsal. The loop must step each of them.

        If an iteration is broken off, the next one continues it. Under ``torch.no_grad()`` nothing is yielded, because
        nobody trains there.

        Args:
            max_batch_size: The largest number of records in a batch. Only the value of the first call counts.

        Raises:
            RehearsalError: If the loop fails the rehearsal, and again at every later call.
        """
        self._open.close()  # restores the state now, even if somebody still holds an old iterator
        if self._next is _BEGIN:
            self._fit_into(max_batch_size)
        if self._failure is not None:
            raise self._failure
        while self._next is not None and torch.is_grad_enabled():
            if self._next is not _BEGIN and not self._observed:
                yield from self._hand_out(self._next)
                if not self._observed:
                    return  # read without training
            with aside.generators_kept():  # a dataset may draw from them
                self._advance()

    def _fit_into(self, max_batch_size: int | None) -> None:
        self._large = min(_LARGE, max_batch_size or _LARGE)
        self._small = max(2, min(_SMALL, self._large - 1))
        self._choice: Choice = self._choose(large=self._large, small=self._small)

    def _advance(self) -> None:
        """Passes the observation to the procedure and takes the next batch from it. The batch has been stepped."""
        try:
            self._next = next(self._script) if self._next is _BEGIN else self._script.send(self._observed.pop())
        except StopIteration:
            self._next = self._optimizer.rehearsal = None
        except RehearsalError as error:
            self._failure = error  # raised again, in case the loop catches it
            raise

    def _hand_out(self, request: _Pass) -> Iterator[tuple[int, Any]]:
        model, optimizer = self._gradients.model, self._optimizer
        optimizers = (optimizer, optimizer.original_optimizer)
        if self._schedulers is None:
            self._schedulers = aside.schedulers_of(optimizers)
        follow = traced(model, len(request.records), optimizer.views, request.position)
        self._open.close()
        with ExitStack() as self._open:
            self._open.enter_context(aside.state_kept(model, optimizers, self._schedulers))
            self._open.enter_context(self._gradients.state.paused())
            self._visits = self._open.enter_context(follow)
            self._before = Fingerprint(model), _attributes(model)
            if request.quiet != "none":
                chosen = [m for m in model.modules() if request.quiet == "all" or aside.is_dropout(m)]
                self._open.enter_context(aside.in_evaluation_mode(chosen))
            aside.seed_everything(request.seed)
            batch = self._collate([copied(record) for record in request.records])  # which may change them
            self._content, collated = content(batch), aside.generator_states()
            aside.seed_everything(request.seed)  # the loop draws the same, however much the collation drew
            self._begun = aside.generator_states(), collated
            yield len(request.records), batch

    def _procedure(self) -> Passes[None]:
        if self._large > 1:
            yield from self._compare()
        else:  # no record has a mate, but what the model writes may depend on the record
            yield from self._run([_Pass([record]) for record in self._choice.records(0)[:2]])
        if self._with_empty_batch:
            yield _Pass([])

    def _compare(self) -> Passes[None]:
        passes = yield from self._other_sizes(self._choice.records(0), (_SMALL_DRAW, _LARGE_DRAW, *_BETWEEN))
        if self._agree(passes, SAME_SHAPE):
            return
        drew = any(len(set(drawn)) > 1 for drawn in self._drawn)
        yield from self._require_other_mates_alike(1, _SMALL_DRAW, 0)
        yield from self._require_other_mates_alike(2, _LARGE_DRAW, self._large // 2)
        if self._agree(passes, _tolerance(passes)):
            return
        # If random numbers were drawn, one test without them decides. If none were, something failed that does not
        # always fail, such as a choice by majority, so the test is repeated with other records.
        for test in (3,) if drew else (3, 4, 5, 6):
            quiet = yield from self._other_sizes(self._choice.records(test), (_SMALL_DRAW,) * 5, "all")
            if not self._agree(quiet, _tolerance(quiet)):
                break
        else:
            return  # it was dropout or other randomness of training, or a unit at its kink
        if self._differ(quiet[0], quiet[4], _tolerance(quiet)):  # it depends on the order: random numbers remain
            exact = yield from self._twins_first()
            if exact is None:
                if has_other_scale([*passes, *quiet], self._optimizer.loss_reduction, self._small):
                    raise RehearsalError(wrong_reduction(self._optimizer.loss_reduction))
                return
            if self._agree(exact, _tolerance(exact)):
                return
            quiet = exact
        other: Sum = "sum" if self._optimizer.loss_reduction == "mean" else "mean"
        if self._agree(quiet, _tolerance(quiet), (other,)):
            raise RehearsalError(wrong_reduction(self._optimizer.loss_reduction))
        raise RehearsalError(depends_on_size(self._meeting(_tolerance(quiet)), self._optimizer.views))

    def _require_other_mates_alike(self, test: int, seed: int, place: int) -> Passes[None]:
        """Raises ``RehearsalError`` if other mates make a difference that random numbers do not explain.

        Random numbers cannot explain it if records are only exchanged with twins, which draw equally many. So twins are
        used if the collation is known to draw, and otherwise as the last attempt.
        """
        attempts: list[tuple[bool, Quiet]] = [(False, "none"), (False, "dropout"), (True, "dropout")]
        if self._are_alike:
            attempts = attempts[:2]
        elif self._collation_draws or self._needs_twins:
            attempts = [(True, "none"), (True, "dropout")]
        for with_twins, quiet in attempts:
            self._needs_twins |= with_twins
            records = self._choice.with_twins(test) if with_twins else None
            records = records or self._choice.records(test)
            are_alike, is_random = yield from self._other_mates(records, seed, place, quiet)
            if are_alike:
                return
            if not is_random:
                break
        if is_random and len(set(self._drawn[:4])) > 1:
            raise RehearsalError(cannot_tell())
        raise RehearsalError(depends_on_mates(self._meeting(SAME_SHAPE), self._optimizer.views))

    # The tests.

    def _other_sizes(
        self, records: Sequence[Any], seeds: Sequence[int], quiet: Quiet = "none"
    ) -> Passes[list[Observation]]:
        """Puts ``a`` last in a large batch and first in a small one; both without it; with a fifth seed, reordered."""
        a, *others = records
        large, small = others[: self._large - 1], others[self._large - 1 :][: self._small - 1]
        passes = [_Pass([*large, a], len(large)), _Pass(large), _Pass([a, *small], 0), _Pass(small)]
        passes.append(_Pass([a, *reversed(large)]))
        return (yield from self._run([p._replace(seed=s, quiet=quiet) for p, s in zip(passes, seeds, strict=False)]))

    def _other_mates(
        self, records: Sequence[Any], seed: int, place: int, quiet: Quiet = "none"
    ) -> Passes[tuple[bool, bool]]:
        """Puts ``a`` and ``b`` in the same place beside the same mates, and beside others. The longest record stays.

        Returns whether this made no difference and, if it did, whether other random numbers make one, too.
        """
        a, longest, b, *others = records
        tail = [longest] if self._large > 2 else []
        few = min(self._large - 1 - len(tail), len(others) // 2)
        mates, strangers = [*others[:few], *tail], [*others[few : 2 * few], *tail]
        passes = [
            _Pass([*beside[:place], record, *beside[place:]], followed, seed, quiet)
            for beside in (mates, strangers)
            for record, followed in ((a, place), (b, None))
        ]
        passes.append(passes[0]._replace(position=None))
        seen = yield from self._run(passes)
        spread = max(mismatch(kind, [seen[0]], [seen[4]]) for kind in self._kinds)  # of the same batch
        if self._agree(seen, SAME_SHAPE + 10 * spread):
            return True, False
        other_numbers = yield passes[4]._replace(seed=seed + 1)
        return False, self._differ(seen[0], other_numbers, SAME_SHAPE)

    def _twins_first(self) -> Passes[list[Observation] | None]:
        """Puts twins first in a batch of many long records and in one of few short records, in evaluation mode.

        Returns None unless ``a`` got the same random numbers in both, and nothing is random after the collation.
        """
        loop_draws = any(drawn.stepped != drawn.seeded for drawn in self._drawn)
        chosen = self._choice.twins_and_mates(3) if self._collation_draws and not loop_draws else None
        if chosen is None:
            return None
        a, b, few, many = chosen
        passes = [_Pass([a, *many], 0), _Pass([b, *many]), _Pass([a, *few], 0), _Pass([b, *few]), _Pass([a, *many])]
        exact = None
        for seed in (_SMALL_DRAW, _LARGE_DRAW):  # a random crop may leave the same of both twins
            seen = yield from self._run([each._replace(quiet="all", seed=seed) for each in passes])
            (ours, theirs), sizes = self._contents, (len(many) + 1, len(few) + 1)
            if self._differ(seen[0], seen[4], SAME_SHAPE):  # the loop has a generator of its own
                return None
            if same_but_for_padding(ours, theirs, sizes, self._optimizer.views):
                exact = seen
                if not self._agree(seen, _tolerance(seen)):
                    break
        return exact

    def _run(self, passes: Sequence[_Pass]) -> Passes[list[Observation]]:
        self._left_behind, self._traces, self._contents, self._drawn, seen = [], [], [], [], []
        for each in passes:
            seen.append((yield each))
            if each.position is not None:
                self._traces.append(self._visits)
                self._contents.append(self._content)
        self._check_state()
        return seen

    def _observe(self, batches: list[RecordedBatch]) -> None:
        """Records the gradients of a batch. ``optimizer.step()`` calls it."""
        observation = observe(self._gradients, batches, self._optimizer.loss_reduction, self._floor)
        self._floor = observation.floor
        self._observed.append(observation)
        self._drawn.append(_Drawn(*self._begun, aside.generator_states()))
        self._collation_draws |= self._drawn[-1].collated != self._drawn[-1].seeded
        model, (untouched, attributes) = self._gradients.model, self._before
        after = Fingerprint(model)
        rebound = [name for name, value in _attributes(model).items() if attributes.get(name) is not value]
        self._left_behind.append((after, {*after.changes(untouched), *rebound}))

    # What is concluded.

    @property
    def _kinds(self) -> tuple[Sum, Sum]:
        return self._optimizer.loss_reduction, "direction"

    def _agree(self, passes: Sequence[Observation], tolerance: float, kinds: Sequence[Sum] = ()) -> bool:
        """Returns whether first - second = third - fourth, up to the tolerance."""
        plus, minus = [passes[0], passes[3]], [passes[1], passes[2]]
        return all(mismatch(kind, plus, minus) <= tolerance for kind in kinds or self._kinds)

    def _differ(self, one: Observation, other: Observation, tolerance: float) -> bool:
        return max(mismatch(kind, [one], [other]) for kind in self._kinds) > tolerance

    def _meeting(self, tolerance: float) -> Meeting | None:
        ours, theirs = self._traces
        return first_difference(ours, theirs, tolerance)

    def _check_state(self) -> None:
        """Raises ``RehearsalError`` if what a pass writes into the model depends on the data."""
        written = sorted(set[str]().union(*(names for _, names in self._left_behind)))
        entries = held(self._gradients.model)
        first = self._left_behind[0][0]
        raw = [
            name
            for name in written
            if (name in entries and entries[name].kind == "parameter")
            or not all(after.agrees(first, name) for after, _ in self._left_behind)
        ]
        if raw:
            raise RehearsalError(self._gradients.state.explanation(raw))
        self._gradients.state.allow(written)


def _attributes(model: nn.Module) -> dict[str, Any]:
    return {name: entry.value for name, entry in held(model).items() if entry.kind == "attribute"}


def _tolerance(passes: Sequence[Observation]) -> float:
    return max(OTHER_SHAPE, UNITS * max(o.precision for o in passes))
