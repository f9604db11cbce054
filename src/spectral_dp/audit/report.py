"""What an audit found: verdicts, and the report that collects them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from spectral_dp.audit.statistics.coverage import Coverage


@dataclass(frozen=True)
class Verdict:
    """The outcome of one audit.

    Attributes:
        audit: Which audit.
        tested: What it was applied to.
        quantity: What ``claimed`` and ``measured`` are.
        claimed: The value that follows from the claim.
        measured: What was found: a bound at ``confidence``, or the value itself where that is None.
        wanted: On which side of the claim the measured value must lie; None where the audit could not be made (the note
            says why).
        confidence: That the audit does not accuse a sound release, all its looks together; None where it is exact.
        slack: How far beyond the claim the measured value may lie, for rounding.
        seconds: How long the audit took. :func:`~spectral_dp.audit.run_audit` measures it.
        note: In plain words, what was found or why it was left out.
        details: Plain values for the JSON report.
    """

    audit: str
    tested: str
    quantity: str
    claimed: float
    measured: float
    wanted: Literal["at least", "at most"] | None
    confidence: float | None = None
    slack: float = 0.0
    seconds: float = 0.0
    note: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def left_out(cls, audit: str, reason: str) -> Verdict:
        """An audit that could not be made."""
        return cls(audit, "nothing", "", math.nan, math.nan, None, note=reason)

    @property
    def ok(self) -> bool | None:
        """Whether the claim stands; None where the audit could not be made."""
        if self.wanted is None:
            return None
        if self.wanted == "at most":
            return self.measured <= self.claimed + self.slack
        return self.measured >= self.claimed - self.slack

    @property
    def outcome(self) -> Literal["holds", "VIOLATION", "not made"]:
        """The verdict in a word or two."""
        return "not made" if self.ok is None else "holds" if self.ok else "VIOLATION"

    def __str__(self) -> str:
        """The outcome first, and what was tested below.

        >>> print(Verdict("noise law", "32 steps", "p-value", 0.01, 0.4, "at least", 0.99))
        holds      noise law: p-value 0.4, wanted at least 0.01 (confidence 0.99)
                   32 steps
        """
        if self.ok is None:
            return f"{self.outcome:<9}  {self.audit}: {self.note}"
        sure = "exact" if self.confidence is None else f"confidence {self.confidence:.4g}"
        found = f"{self.quantity} {self.measured:.4g}, wanted {self.wanted} {self.claimed:.4g} ({sure})"
        below = [line for part in (self.tested, self.note) for line in part.splitlines()]
        return "\n".join([f"{self.outcome:<9}  {self.audit}: {found}", *(f"{'':11}{line}" for line in below)])


@dataclass(frozen=True)
class Report:
    """All verdicts on one target.

    Attributes:
        target: What was audited.
        claim: Its settings and the epsilon they are said to give.
        verdicts: In the order in which the audits were made.
        scores: Canary scores for the plot, by name; not part of the JSON.
        coverage: Which calls of the target had their noise looked at.
    """

    target: str
    claim: Mapping[str, Any]
    verdicts: tuple[Verdict, ...]
    scores: Mapping[str, Any] = field(default_factory=dict)
    coverage: Coverage | None = None

    @property
    def ok(self) -> bool:
        """Whether no audit found a violation, and at least one could be made."""
        return any(v.ok for v in self.verdicts) and not self.violations

    @property
    def violations(self) -> tuple[Verdict, ...]:
        """The verdicts that contradict the claim."""
        return tuple(v for v in self.verdicts if v.ok is False)

    @property
    def epsilon_lower_bound(self) -> float:
        """The largest epsilon that a canary audit of the run, or of its first steps, has shown; 0 where none was."""
        shown = [
            v.measured
            for v in self.verdicts
            if v.audit in ("canaries, many steps", "canaries, one run") and v.ok is not None
        ]
        return max(shown, default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values; what is infinite or not a number is null, as JSON has neither."""
        verdicts = [asdict(v) | {"details": dict(v.details), "ok": v.ok} for v in self.verdicts]
        whole = {
            "target": self.target,
            "claim": dict(self.claim),
            "epsilon_lower_bound": self.epsilon_lower_bound,
            "ok": self.ok,
            "coverage": None if self.coverage is None else self.coverage.to_json(),
            "seconds": sum(v.seconds for v in self.verdicts),
            "verdicts": verdicts,
        }
        return _finite(whole)

    @property
    def conclusion(self) -> str:
        """The claim, what was shown against it, and what was looked at, in plain words."""
        claim = self.claim
        words = f"claimed epsilon {claim['epsilon']:.4g} at delta {claim['delta']:g}"
        if "total_epsilon" in claim:  # what the whole run spends, of which this audit has looked at a part
            words += f" ({claim['total_epsilon']:.4g} with the releases beside these steps)"
        if self.epsilon_lower_bound:
            words += f", lower bound {self.epsilon_lower_bound:.4g}"
        words = f"{words}: {'no violation found' if self.ok else 'the claim does NOT hold'}"
        if left_out := sum(v.ok is None for v in self.verdicts):
            words += f" ({left_out} of {len(self.verdicts)} audits could not be made)"
        return words if self.coverage is None else f"{words}\n{self.coverage}"

    def __str__(self) -> str:
        return "\n".join([f"audit of {self.target}", *map(str, self.verdicts), self.conclusion])


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
