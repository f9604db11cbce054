"""The ledger: a list of the noisy releases of a run, in order, and the privacy that they have spent together."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from spectral_dp._processes import this_process
from spectral_dp.accounting.privacy_loss import Accountant, Phase, checked, checked_phase, spending
from spectral_dp.relations import Relation

_CHAIN = "spectral-dp ledger 1"  # first input of every digest: another way to compute digests needs another name
_KEYS = {"identity", "relation", "entries", "head"}


class Entry(NamedTuple):
    """Consecutive steps with the same parameters that one ledger object recorded."""

    writer: str
    phase: Phase


class Ledger:
    """An append-only list of the steps that were run, under one neighbouring relation.

    Recording is cheap enough to be done at every step.

    Formal guarantee:

    - What is bounded: all recorded releases together are ``(ledger.epsilon(δ), δ)``-DP, by the theorems in
      ``calibration.py``.
    - For which neighbours: data sets that are neighbours under ``ledger.relation``.
    - Under which assumptions: every release was recorded with at most its true noise multiplier and at least its true
      sample rate. The phases must not be *chosen* from earlier releases: a ledger bounds the composition that it
      lists, but it is not a privacy filter.

    A chain of digests tells one ledger from another, so that a ledger is not continued from the wrong one:

    - ``identity`` is drawn at random for every new ledger and is kept by every ledger that continues it.
    - Each entry names its writer, which is drawn at random for every ledger *object*. So two continuations of one
      saved ledger differ from their first step on, even if both made the same number of equal steps.
    - ``head`` is the last link of a chain of SHA-256 digests. The first link covers the identity and the relation;
      every further link covers the link before it and one entry. Equal heads mean equal ledgers, entry by entry.
    - :meth:`load_state_dict` accepts only a ledger that continues this one, so a ledger never forgets a step.

    The digests contain no secret: whoever can write a saved ledger can also compute a valid head for it. They detect
    mistakes and careless changes, but not forgeries.

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
        self.sign_anew()

    def sign_anew(self) -> None:
        """Gives this object a new name as a writer, which no other object has, for the releases that it will record."""
        self._writer, self._process = os.urandom(8).hex(), this_process()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.sign_anew()  # a copy records releases of its own

    @property
    def signature(self) -> tuple[str, str]:
        """The identity of this ledger, and the name under which this object records releases."""
        return self.identity, self._writer

    def sign_as(self, signature: tuple[str, str]) -> None:
        """Makes this ledger a copy of another one that records the *same* releases from now on, in another process.

        Raises:
            ValueError: If this ledger already lists releases of another run.
        """
        identity, writer = signature
        if self.steps and identity != self.identity:
            raise ValueError(f"this ledger lists steps of run {self.identity[:8]}, so it is none of run {identity[:8]}")
        self.identity, self._writer, self._process = _checked_hex(identity, 16), _checked_hex(writer, 8), this_process()

    def record(self, noise_multiplier: float, sample_rate: float, steps: int = 1) -> None:
        """Appends ``steps`` releases with the same parameters to the ledger.

        Args:
            noise_multiplier: Standard deviation of the noise, divided by the sensitivity. A multiplier of 0 is
                recorded as well and makes epsilon infinite.
            sample_rate: Probability in (0, 1] with which a record joined the batch.
            steps: Number of releases.
        """
        phase = checked_phase(noise_multiplier, sample_rate, steps)
        if this_process() != self._process:
            self.sign_anew()  # a forked process records releases of its own, too
        self._append(Entry(self._writer, phase))

    def _append(self, entry: Entry) -> None:
        writer, phase = entry
        if self._entries and (last := self._entries[-1]).writer == writer and last.phase[:2] == phase[:2]:
            self._entries[-1] = Entry(writer, checked_phase(*phase[:2], last.phase.steps + phase.steps))
        else:
            self._entries.append(entry)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The recorded phases. Consecutive equal steps are merged, whichever ledger object recorded them."""
        merged: list[Phase] = []
        for _, phase in self._entries:
            if merged and merged[-1][:2] == phase[:2]:
                merged[-1] = Phase(*phase[:2], merged[-1].steps + phase.steps)
            else:
                merged.append(phase)
        return tuple(merged)

    @property
    def steps(self) -> int:
        """The total number of recorded steps."""
        return sum(entry.phase.steps for entry in self._entries)

    def epsilon(self, delta: float, *, accountant: Accountant = "pld") -> float:
        """Returns an upper bound on the epsilon that the recorded steps have spent at ``delta``."""
        return spending(self.phases, accountant, self.relation).epsilon(checked("delta", delta))

    def delta(self, epsilon: float, *, accountant: Accountant = "pld") -> float:
        """Returns an upper bound on the delta that the recorded steps have spent at ``epsilon``."""
        return spending(self.phases, accountant, self.relation).delta(checked("epsilon", epsilon))

    @property
    def head(self) -> str:
        """The digest of everything that the ledger lists."""
        return self.head_after(self.steps)

    def head_after(self, steps: int) -> str:
        """Returns the head that the ledger had after its first ``steps`` steps.

        A link covers the *number* of steps of its entry. So the running time grows with the number of entries, not
        with the number of steps.
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
        """Returns whether this ledger begins with all the entries of ``earlier``, so that none of them is forgotten."""
        return earlier.steps <= self.steps and self.head_after(earlier.steps) == earlier.head

    def state_dict(self) -> dict[str, Any]:
        """Returns the ledger as plain Python types, which JSON or a checkpoint can hold."""
        return {
            "identity": self.identity,
            "relation": str(self.relation),
            "entries": [[writer, *phase] for writer, phase in self._entries],
            "head": self.head,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Returns the ledger that was saved by :meth:`state_dict`.

        Raises:
            ValueError: If :meth:`state_dict` cannot have written this state, or if the state was changed afterwards.
        """
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
        """Replaces the contents of this ledger by those of a saved one.

        Raises:
            ValueError: If the state is not valid, if its relation is different, or if this ledger already lists steps
                and the saved one does not continue it.
        """
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
