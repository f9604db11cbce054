"""The model card of a finished run: what it is, what it promises, and what only its owner can say.

Its text is the template ``model_card.md``. What the run knows is filled in, and what it cannot know is a question.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from spectral_dp.experiments import in_words
from spectral_dp.experiments.settings import ResolvedSettings
from spectral_dp.experiments.statement import HELD_OUT
from spectral_dp.files import write_text

NAME = "MODEL_CARD.md"


def write_model_card(
    settings: ResolvedSettings, statement: Mapping[str, Any], summary: Mapping[str, Any], directory: Path
) -> None:
    """Writes ``MODEL_CARD.md`` from the settings, the privacy statement and the summary of a run."""
    write_text(directory / NAME, card_text(settings, statement, summary))


def card_text(settings: ResolvedSettings, statement: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Returns the card in Markdown."""
    words = {}
    if statement.get("epsilon") is not None:
        words = {
            "promise": in_words.promise(statement),
            "neighbours": in_words.neighbours(statement),
            "factor": in_words.probability_factor(statement),
            "for_one_person": in_words.for_one_person(statement),
        }
    rate = statement.get("sample_rate")
    records = round(statement["expected_batch_size"] / rate) if rate else None
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, autoescape=False)
    template = files("spectral_dp.experiments").joinpath("model_card.md").read_text(encoding="utf-8")
    held_out = HELD_OUT[:1].upper() + HELD_OUT[1:]
    return environment.from_string(template).render(
        settings=settings, statement=statement, summary=summary, records=records, held_out=held_out, **words
    )
