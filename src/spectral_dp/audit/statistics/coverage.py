"""What an audit looked at, and what it therefore would have found."""

import math
from dataclasses import asdict, dataclass
from typing import Any

#: How rare a release without noise may be for the report to say with what probability it is found.
RARITIES = (100, 1_000, 1_000_000)


@dataclass(frozen=True)
class Coverage:
    """Which releases had their noise looked at.

    Attributes:
        calls: How many releases were looked at, each by itself.
        steps: How many steps of the claimed run were among them, from the first one on.
        claimed_steps: How many steps the claimed run has.
    """

    calls: int
    steps: int
    claimed_steps: int

    @property
    def share(self) -> float:
        """The share of the run's step numbers that was looked at."""
        return self.steps / self.claimed_steps

    def found(self, rarity: int) -> float:
        """With what probability a release without noise is found that happens by chance at one call in ``rarity``.

        >>> round(Coverage(1000, 1000, 5000).found(1000), 3)
        0.632
        """
        return -math.expm1(self.calls * math.log1p(-1 / rarity)) if rarity > 1 else 1.0

    def __str__(self) -> str:
        first, *others = RARITIES
        chances = f"at one call in {first:,} is found with probability {_rounded(self.found(first))}"
        chances += "".join(f", at one in {rarity:,} with {_rounded(self.found(rarity))}" for rarity in others)
        return (
            f"noise was looked at in {self.calls} calls, steps 1 to {self.steps} of {self.claimed_steps} "
            f"({math.floor(100 * self.share)}% of the run); a release without noise {chances}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        found = {f"found_at_one_call_in_{rarity}": self.found(rarity) for rarity in RARITIES}
        return asdict(self) | {"share_of_run": self.share} | found


def _rounded(probability: float) -> str:
    """The probability in words, never rounded up to certainty."""
    return "above 0.99" if probability > 0.99 else f"{probability:.2g}"
