"""What is said of a run's privacy: never more than holds, and what does not hold comes first."""

import dataclasses
import json
import subprocess

import pytest
from tests.support.fabricated_runs import FabricatedMethod

from spectral_dp.experiments import statement as module
from spectral_dp.experiments.statement import as_markdown, privacy_statement, provenance, write_statement

MADE_BY = {"spectral_dp": "0", "torch": "0"}
INFINITE = float("inf")
CONTROL = "spectral_dp.experiments.training_images:digits"


def statement(settings, epsilon=1.99999):
    return privacy_statement(settings, FabricatedMethod(epsilon), MADE_BY)


@pytest.fixture
def private(tiny):
    return tiny(reproducible=False)


def test_a_private_run_says_what_is_guaranteed_and_what_is_not(private):
    said = statement(private)
    assert said["private"]
    assert said["epsilon"] == 1.99999
    assert said["warnings"] == []
    assert list(said["not_covered"]) == list(module.NOT_COVERED)
    assert said["ledger_head"] == FabricatedMethod.ledger.head
    page = as_markdown(said)
    assert "(2, 1e-05)-differential privacy, neighbours by add or remove one" in page, "rounded up, not to nearest"
    assert f"- ledger head: {FabricatedMethod.ledger.head}" in page
    assert "- spectral conv ratio: 0.5" in page


def test_the_number_of_processes_is_stated_with_what_it_assumes(private):
    alone, together = (
        privacy_statement(private, FabricatedMethod(1.0), MADE_BY, processes) for processes in ((1,), (2, 3))
    )
    assert (alone["processes"], together["processes"]) == ("1", "2, then 3")
    assert "noise_shares" not in alone
    assert "- processes: 2, then 3" in as_markdown(together)
    assert "trust each other" in as_markdown(together)


@pytest.mark.parametrize(
    ("change", "epsilon", "warning"),
    [
        ({"reproducible": True}, 1.0, "NOT private"),
        ({"delta": 0.5}, 1.0, "protects nobody"),
        ({}, INFINITE, "epsilon is infinite"),
        ({"features": "patches", "feature_options": {"prior": CONTROL}}, 1.0, module.NOT_PUBLIC),
        ({"features": "patches", "feature_rank": 5, "feature_prior": CONTROL}, 1.0, module.NOT_PUBLIC),
    ],
)
def test_what_is_not_private_is_not_called_so(private, change, epsilon, warning):
    said = statement(dataclasses.replace(private, **change), epsilon)
    assert not said["private"]
    assert any(warning in text for text in said["warnings"])
    assert warning in as_markdown(said)


@pytest.mark.parametrize(
    ("change", "warning"),
    [({"unsafe_diagnostics": True}, module.UNSAFE), ({"method": "opacus"}, module.GENERATOR)],
)
def test_what_else_there_is_to_know_is_said(private, change, warning):
    assert statement(dataclasses.replace(private, **change))["warnings"] == [warning]


def test_what_is_not_public_is_not_said_to_cost_nothing(private):
    options = {"features": "patches", "feature_options": {"prior": CONTROL}}
    said = statement(dataclasses.replace(private, **options))["features"]
    assert "the training records themselves, for which nothing was charged" in said
    assert "releases nothing" not in said


def test_ordinary_training_guarantees_nothing(tiny):
    said = statement(tiny(method="nonprivate"))
    assert said["private"] is False
    assert "epsilon" not in said
    assert "No privacy is guaranteed" in as_markdown(said)


def test_both_files_are_written(private, tmp_path):
    said = statement(private)
    write_statement(said, tmp_path)
    assert json.loads((tmp_path / "privacy.json").read_text(encoding="utf-8")) == said
    assert (tmp_path / "privacy.md").read_text(encoding="utf-8") == as_markdown(said)


class TestProvenance:
    @staticmethod
    def answers(monkeypatch, **codes):
        """Git as it would answer: exit codes by command, and a changed file."""

        def run(command, **_):
            name = next(name for name in ("rev-parse", "ls-files", "status") if name in command)
            out = {"rev-parse": "abc\n", "status": b" M file\n"}.get(name, "")
            return subprocess.CompletedProcess(command, codes.get(name.replace("-", "_"), 0), out, "")

        monkeypatch.setattr(subprocess, "run", run)

    def test_changes_beside_the_commit_are_told(self, monkeypatch):
        self.answers(monkeypatch)
        assert provenance()["commit"] == "abc with changes"

    @pytest.mark.parametrize("command", ["rev_parse", "ls_files"])
    def test_the_commit_of_another_repository_is_not(self, monkeypatch, command):
        """Installed into a virtual environment that lies in somebody's repository, the package is not of its commit."""
        self.answers(monkeypatch, **{command: 1})
        assert "commit" not in provenance()

    def test_without_git_the_version_must_do(self, monkeypatch):
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(FileNotFoundError))
        assert set(provenance()) == {"spectral_dp", "torch"}
