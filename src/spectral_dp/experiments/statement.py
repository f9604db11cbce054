"""The privacy statement of a run: what is guaranteed, for whom, under which assumptions, and what is not."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spectral_dp._version import __version__
from spectral_dp.accounting import Ledger
from spectral_dp.accounting.membership import guarantees_of
from spectral_dp.experiments.feature_stages import feature_facts, features_are_public
from spectral_dp.experiments.fine_tuning import fine_tuning_facts
from spectral_dp.experiments.in_words import attack_odds, for_one_person
from spectral_dp.experiments.method import Method
from spectral_dp.experiments.rounding import rounded_up
from spectral_dp.experiments.settings import ResolvedSettings
from spectral_dp.files import write_json, write_text

_NAMES = {
    "spectral": "Spectral-DP: per-sample gradients filtered by frequency, clipped, summed, Gaussian noise added",
    "dpsgd": "DP-SGD: per-sample gradients clipped, summed, Gaussian noise added",
    "opacus": "DP-SGD by Opacus: per-sample gradients clipped, summed, Gaussian noise added",
    "class-means": "private class means: the features of every class clipped, summed, Gaussian noise added, once",
    "least-squares": "private least squares: Gram matrix and moments of projected features clipped together, summed, "
    "Gaussian noise added, once",
}

#: What ``privacy.md`` tells in another way than as a line of its list.
_TOLD = ("private", "epsilon", "delta", "attack_odds", "relation", "warnings", "not_covered", "spectral", "made_by")

#: What a private run says of figures that are not covered.
HELD_OUT = "accuracy on held-out samples assumes that these are public, or not part of what is protected"
NOT_COVERED = (
    HELD_OUT,
    "settings chosen by looking at results on the same private data (each look costs privacy that is not counted)",
)
UNSAFE = "this run recorded diagnostics of the raw private data (metrics under 'unsafe'): they are NOT to be published"
GENERATOR = (
    "Opacus drew noise and batches from torch's generator, which has 2^32 seeds: whoever tries them all can remove the "
    "noise. Its secure mode was not used"
)
SHARES = (
    "each process drew an equal share of the noise: the processes are assumed to trust each other, and to keep their "
    "shares secret"
)
SEEDED = (
    "noise and batches were drawn from a seed for the sake of reproducibility: whoever knows the seed can remove the "
    "noise, so this run is NOT private; it shows what a private run with these settings gives"
)

NOT_PUBLIC = (
    "the features were made with statistics of the private records that were neither noised nor charged: this run is a "
    "control and is NOT private"
)


def provenance() -> dict[str, Any]:
    """Returns the versions that made a result, and the commit where the package lies in a git repository."""
    found = {"spectral_dp": __version__, "torch": torch.__version__}
    try:
        package = Path(__file__).parents[1]
        ask = ["git", "-C", str(package)]
        commit = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        tracked = subprocess.run([*ask, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10)
        if commit.returncode == 0 and tracked.returncode == 0:
            changed = subprocess.run([*ask, "status", "--porcelain", "--", "."], capture_output=True, timeout=10)
            found["commit"] = commit.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
    except (OSError, subprocess.TimeoutExpired):
        pass  # no git: the version must do
    return found


def privacy_statement(
    settings: ResolvedSettings, method: Method, made_by: dict[str, Any], processes: Sequence[int] = (1,)
) -> dict[str, Any]:
    """Returns the statement as plain values.

    Args:
        settings: The settings of the run.
        method: What trained.
        made_by: The :func:`provenance` of the run.
        processes: How many processes trained together; several numbers if the run went on with more or fewer of them.
    """
    if not settings.is_private:
        nothing: dict[str, Any] = {"warnings": [], "not_covered": [], "made_by": made_by}
        return {"private": False, "mechanism": "none: ordinary training"} | nothing
    epsilon, facts, ledger = method.epsilon(), method.facts(), method.ledger
    assert epsilon is not None
    assert ledger is not None
    finite = epsilon < float("inf")
    warnings = [SEEDED] * settings.reproducible + [UNSAFE] * settings.unsafe_diagnostics
    is_public = features_are_public(settings)
    warnings += [NOT_PUBLIC] * (not is_public)
    if not finite:
        warnings.append("without noise nothing is guaranteed: epsilon is infinite")
    records = facts["expected_batch_size"] / facts["sample_rate"]
    protects = settings.delta * records < 1
    if not protects:
        warnings.append(f"delta {settings.delta:g} is not below one over the number of records: it protects nobody")
    if settings.method == "opacus" and not settings.reproducible:
        warnings.append(GENERATOR)
    return {
        "private": finite and protects and is_public and not settings.reproducible,
        "mechanism": _NAMES[settings.method],
        "epsilon": epsilon if finite else None,
        "delta": settings.delta,
        **({"attack_odds": _odds(settings, ledger, epsilon)} if finite else {}),
        "max_grad_norm": settings.sensitivity_bound,
        "sampling": "Poisson: every record takes part in every step with the sample rate, independently",
        **facts,
        "processes": ", then ".join(map(str, processes)),
        **({"noise_shares": SHARES} if max(processes) > 1 else {}),
        **feature_facts(settings),
        **fine_tuning_facts(settings),
        "ledger_identity": ledger.identity,  # with the head: which checkpoint this is the statement of
        "ledger_head": ledger.head,
        "covers": "all weights the run passed through, and whatever is computed from them",
        "not_covered": list(NOT_COVERED),
        "warnings": warnings,
        "made_by": made_by,
    }


def _odds(settings: ResolvedSettings, ledger: Ledger, epsilon: float) -> dict[str, float]:
    return attack_odds([(epsilon, settings.delta), *guarantees_of(ledger, settings.accountant)])


def write_statement(statement: dict[str, Any], directory: Path) -> None:
    """Writes ``privacy.json`` and, for people, ``privacy.md``."""
    write_json(directory / "privacy.json", statement)
    write_text(directory / "privacy.md", as_markdown(statement))


def as_markdown(statement: dict[str, Any]) -> str:
    """Returns the statement as a page of text."""
    if statement.get("epsilon") is None:
        head = "No privacy is guaranteed: " + statement["mechanism"] + "."
    else:
        head = (
            f"({rounded_up(statement['epsilon'])}, {statement['delta']:g})-differential privacy, neighbours by "
            f"{statement['relation'].replace('_', ' ')}."
        )
    lines = ["# Privacy statement", "", head, ""]
    if statement.get("epsilon") is not None:
        lines += [for_one_person(statement), ""]
    lines += [f"> **{warning}**\n" for warning in statement.get("warnings", [])]
    lines += [f"- {name.replace('_', ' ')}: {value}" for name, value in statement.items() if name not in _TOLD]
    lines += [f"- spectral {k.replace('_', ' ')}: {v}" for k, v in statement.get("spectral", {}).items()]
    lines += [f"- {k}: {v}" for k, v in statement["made_by"].items()]
    if statement["not_covered"]:
        lines += ["", "Not covered:", ""] + [f"- {item}" for item in statement["not_covered"]]
    return "\n".join(lines) + "\n"
