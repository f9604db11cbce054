"""The ledger: which noisy releases were made, in order, by which run, and what they have spent together."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from spectral_dp.accounting.privacy_loss import Accountant, Phase, checked, checked_phase, spending
from spectral_dp.relations import Relation

_CHAIN = "spectral-dp ledger 1"  # what the digests are of: another way to compute them needs another name
_KEYS = {"identity", "relation", "entries", "head"}


class Entry(NamedTuple):
    """Consecutive equal steps that one ledger object wrote down."""

    writer: str
    phase: Phase


class Ledger:
    """The steps actually run, in order: append-only, one neighbouring relation, cheap to write at every step.

    Formal guarantee. If every release was recorded with at most its true noise multiplier and at least its true
    sample rate, all of them together are ``(ledger.epsilon(δ), δ)``-DP, as ``calibration.py`` says. The phases must not
    be *chosen* from earlier releases: a ledger bounds the composition it lists, it is not a privacy filter.

    The chain. Whose steps a ledger lists can be told, so that no other ledger is taken for it:

    * ``identity`` is drawn at random for every new ledger and stays with what continues it.
    * Each entry carries its writer, drawn at random for every ledger *object*. So two continuations of one saved
      ledger differ from their first step on, even where both made equally many equal steps.
    * ``head`` is the last link of a chain of SHA-256 digests: over identity and relation first, then each over the one
      before and one entry. Equal heads mean equal ledgers, entry by entry.
    * :meth:`load_state_dict` takes only what continues the ledger, so a ledger never forgets a step.

    The digests hold no secret: whoever can write a saved ledger can also compute a head for what they wrote. They tell
    a mistake and a careless change, not a forgery.

    >>> ledger = Ledger()
    >>> ledger.record(1.0, 0.01, steps=500)
    >>> ledger.record(2.0, 0.01)
    >>> ledger.steps, len(ledger.phases)
    (501, 2)
    """

    def __init__(self, relation: Relation = Relation.ADD_OR_REMOVE_ONE) -> None:
        self.relation = Relation(relation)
        self.identity = os.urandom(16).hex()
        self._entries: list[Entry] = []
        self._become_a_writer()

    def _become_a_writer(self) -> None:
        self._writer, self._process = os.urandom(8).hex(), os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._become_a_writer()  # a copy writes down its own releases

    def record(self, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """Appends ``steps`` releases. A multiplier of 0 is recorded too, and makes epsilon infinite."""
        phase = checked_phase(noise_multiplier, sample_rate, steps)
        if os.getpid() != self._process:
            self._become_a_writer()  # so does a forked process
        self._append(Entry(self._writer, phase))

    def _append(self, entry: Entry) -> None:
        writer, phase = entry
        if self._entries and (last := self._entries[-1]).writer == writer and last.phase[:2] == phase[:2]:
            self._entries[-1] = Entry(writer, checked_phase(*phase[:2], last.phase.steps + phase.steps))
        else:
            self._entries.append(entry)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What was recorded, consecutive equal steps merged, whoever wrote them down."""
        merged: list[Phase] = []
        for _, phase in self._entries:
            if merged and merged[-1][:2] == phase[:2]:
                merged[-1] = Phase(*phase[:2], merged[-1].steps + phase.steps)
            else:
                merged.append(phase)
        return tuple(merged)

    @property
    def steps(self) -> int:
        """Total number of steps."""
        return sum(entry.phase.steps for entry in self._entries)

    def epsilon(self, delta: float, *, accountant: Accountant = "pld") -> float:
        """Returns the epsilon spent so far at ``delta``."""
        return spending(self.phases, accountant, self.relation).epsilon(checked("delta", delta))

    def delta(self, epsilon: float, *, accountant: Accountant = "pld") -> float:
        """Returns the delta spent so far at ``epsilon``."""
        return spending(self.phases, accountant, self.relation).delta(checked("epsilon", epsilon))

    @property
    def head(self) -> str:
        """The digest of all that is recorded."""
        return self.head_after(self.steps)

    def head_after(self, steps: int) -> str:
        """Returns the head as it was after the first ``steps`` steps.

        A link covers the *number* of steps of its entry, so the time this takes grows with the entries, not with the
        steps.
        """
        if not 0 <= steps <= self.steps:
            raise ValueError(f"the ledger lists {self.steps} steps, so it had no head after {steps}")
        digest = hashlib.sha256(f"{_CHAIN}\n{self.identity}\n{self.relation}\n".encode()).digest()
        for writer, (noise_multiplier, sample_rate, recorded) in self._entries:
            if steps == 0:
                break
            counted = min(recorded, steps)
            steps -= counted
            link = bytes.fromhex(writer) + struct.pack(">ddQ", noise_multiplier, sample_rate, counted)
            digest = hashlib.sha256(digest + link).digest()
        return digest.hex()

    def continues(self, earlier: Ledger) -> bool:
        """Whether this ledger begins with everything that ``earlier`` lists, and so forgets nothing of it."""
        return earlier.steps <= self.steps and self.head_after(earlier.steps) == earlier.head

    def state_dict(self) -> dict[str, Any]:
        """Returns plain types, for JSON or a checkpoint."""
        return {
            "identity": self.identity,
            "relation": str(self.relation),
            "entries": [[writer, *phase] for writer, phase in self._entries],
            "head": self.head,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Restores a ledger, refusing anything that :meth:`state_dict` could not have written."""
        try:
            if set(state) != _KEYS:
                raise ValueError(f"expected the keys {sorted(_KEYS)}, found {sorted(map(str, state))}")
            ledger = cls(Relation(state["relation"]))
            ledger.identity = _checked_hex(state["identity"], 16)
            for writer, *phase in state["entries"]:
                ledger._append(Entry(_checked_hex(writer, 8), checked_phase(*phase)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not the state of a ledger: {error}") from error
        if ledger.head != state["head"]:
            raise ValueError(
                f"the ledger was changed after it was written: its entries have the head {ledger.head[:16]}..., but it "
                f"says {state['head']!s:.16}.... Take a copy that nobody changed"
            )
        return ledger

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved ledger, in place; one that lists steps already takes only what continues it."""
        saved = type(self).from_state_dict(state)
        if saved.relation != self.relation:
            raise ValueError(f"the saved ledger is under {saved.relation}, this one under {self.relation}")
        if self.steps and not saved.continues(self):
            raise ValueError(
                f"{self._difference(saved)}: going on from it would forget what these steps released. Take the last "
                "one that this run saved; or, if nobody saw what they released, load it into a new engine"
            )
        self.identity, self._entries = saved.identity, saved._entries

    def _difference(self, saved: Ledger) -> str:
        mine, theirs = f"this ledger lists {self.steps} steps", f"lists {saved.steps}"
        if saved.identity != self.identity:
            return f"{mine} of run {self.identity[:8]} and the saved one {theirs} of another run, {saved.identity[:8]}"
        if self.continues(saved):
            return f"{mine} and the saved one, of the same run, {theirs} only"
        return f"{mine} and the saved one {theirs}, others: both continued the same run, each by itself"

    def __eq__(self, other: object) -> bool:
        return self.head == other.head if isinstance(other, Ledger) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        phases = list(self.phases)
        return f"Ledger(identity={self.identity[:8]!r}, relation={str(self.relation)!r}, phases={phases})"


def _checked_hex(value: object, size: int) -> str:
    if isinstance(value, str) and len(value) == 2 * size and not set(value) - set("0123456789abcdef"):
        return value
    raise ValueError(f"expected {size} bytes in hexadecimal, got {value!r:.60}")
