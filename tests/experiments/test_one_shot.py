"""Runs that make a head in one release: budget, statement, checkpoint, evaluation, deployment."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.support.extractors import Scaled
from torch import nn

from spectral_dp.accounting import Ledger, gaussian_epsilon
from spectral_dp.experiments import trainer
from spectral_dp.experiments.audit_target import target_from_run
from spectral_dp.experiments.run_directory import RunDirectory, RunDirectoryError
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.features import register_extractor, registry
from spectral_dp.training import checkpoint

METHODS = ("class-means", "least-squares")


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path_factory.getbasetemp() / "features-for-heads"))  # shared
    monkeypatch.setattr(registry, "_REGISTRY", {**registry._REGISTRY})
    register_extractor("scaled", lambda images: Scaled(), assumption="a factor", settings={"feature_norm": "public"})


def settings(method="class-means", **others):
    common = {"model": "linear", "features": "scaled", "epsilon": 3.0, "delta": 1e-4, "threads": 1}
    return Settings(**common | {"method": method} | others).resolved()


def run(tmp_path, chosen, name="run", **options):
    directory = RunDirectory(tmp_path / name)
    return trainer.run(chosen, directory, **options), directory


def ledger_of(directory):
    return Ledger.from_state_dict(checkpoint.load(directory.checkpoint)["state"]["ledger"])


@pytest.mark.parametrize("method", METHODS)
class TestRun:
    def test_it_is_one_release_within_the_budget(self, tmp_path, method):
        summary, directory = run(tmp_path, settings(method))
        ((sigma, rate, steps),) = ledger_of(directory).phases
        assert (rate, steps, summary["steps"], summary["epochs"]) == (1.0, 1, 1, 1)
        assert summary["noise_multiplier"] == sigma
        assert summary["epsilon"] == pytest.approx(gaussian_epsilon(sigma, 1e-4), rel=1e-3)
        assert 2.98 < summary["epsilon"] <= 3.0
        assert summary["heldout_accuracy"] > 0.7

    def test_the_statement_says_what_is_released(self, tmp_path, method):
        _, directory = run(tmp_path, settings(method))
        stated = json.loads(directory.privacy.read_text())
        assert stated["private"]
        assert stated["sampling"] == "none: all records, in one release"
        assert stated["expected_batch_size"] == 1437
        assert stated["max_grad_norm"] == pytest.approx(1.0 if method == "class-means" else 2**0.5)
        assert method.replace("-", " ") in stated["mechanism"]
        assert "scaled: a factor" in stated["features"]

    def test_the_weights_are_a_dense_layer_with_the_accuracy_of_the_summary(self, tmp_path, method):
        chosen = settings(method, feature_norm="none")
        summary, directory = run(tmp_path, chosen)
        weights, dataset = load_file(directory.weights), trainer.load_data(chosen)
        layer = nn.Linear(128, 10)
        layer.load_state_dict({name: weights[f"fc.{name}"] for name in ("weight", "bias")})
        found = layer(dataset.test_images[:].float().flatten(1)).argmax(1)
        assert (found == dataset.test_labels).float().mean() == pytest.approx(summary["heldout_accuracy"])

    def test_a_finished_run_can_be_audited(self, tmp_path, method):
        """What it claims is what its statement says, no more and no less."""
        summary, directory = run(tmp_path, settings(method))
        claim = target_from_run(directory.path).claim
        assert (claim.steps, claim.sample_rate) == (1, 1.0)
        assert claim.stated_epsilon == summary["epsilon"]
        assert claim.total_epsilon == pytest.approx(summary["epsilon"], rel=1e-6)

    def test_a_finished_run_is_not_released_again(self, tmp_path, method):
        chosen = settings(method)
        _, directory = run(tmp_path, chosen)
        before = directory.weights.read_bytes()
        with pytest.raises(RunDirectoryError, match="add --resume"):
            run(tmp_path, chosen)
        run(tmp_path, chosen, resume=True)
        assert directory.weights.read_bytes() == before
        assert ledger_of(directory).steps == 1

    def test_a_run_that_was_stopped_after_its_release_goes_on_with_it(self, tmp_path, method, monkeypatch):
        """Catches a second release, which would cost a second time, and a statement that forgets the first."""
        chosen = settings(method)

        def stop(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(trainer, "evaluate", stop)
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path, chosen)
        first = ledger_of(RunDirectory(tmp_path / "run"))
        summary, directory = run(tmp_path, chosen, resume=True)
        assert ledger_of(directory) == first
        assert summary["epsilon"] == pytest.approx(first.epsilon(1e-4), rel=1e-9)
        assert directory.read(directory.privacy)["ledger_head"] == first.head

    def test_the_release_is_for_the_neighbours_that_the_statement_names(self, tmp_path, method):
        """Noise follows the relation of the ledger: with another one there would be half of what is stated."""
        _, directory = run(tmp_path, settings(method, relation="replace_one"))
        assert ledger_of(directory).relation == directory.read(directory.privacy)["relation"] == "replace_one"

    def test_reproducible_runs_are_alike_and_others_are_not(self, tmp_path, method):
        a, b, c = (
            run(tmp_path, settings(method, reproducible=r), name)[1].weights.read_bytes()
            for name, r in (("a", True), ("b", True), ("c", False))
        )
        assert a == b != c

    def test_private_statistics_are_within_the_same_budget(self, tmp_path, method):
        chosen = settings(method, feature_norm="private", feature_noise_multiplier=10.0)
        summary, directory = run(tmp_path, chosen)
        ledger = ledger_of(directory)
        assert [phase[1:] for phase in ledger.phases] == [(1.0, 1), (1.0, 1)]
        assert ledger.phases[0].noise_multiplier == 10.0
        assert summary["epsilon"] == pytest.approx(ledger.epsilon(1e-4), rel=1e-9)
        assert 2.98 < summary["epsilon"] <= 3.0
        assert summary["steps"] == 1


class TestOptions:
    def test_features_are_projected_to_so_many_dimensions(self, tmp_path):
        _, directory = run(tmp_path, settings("least-squares", head_dimensions=5))
        assert torch.linalg.matrix_rank(load_file(directory.weights)["fc.weight"], rtol=1e-5) == 5
        assert "(5 dimensions" in json.loads(directory.privacy.read_text())["clipping"]

    def test_without_noise_it_says_that_nothing_is_guaranteed(self, tmp_path):
        with pytest.warns(RuntimeWarning, match="not private"):
            summary, directory = run(tmp_path, settings(epsilon=None, noise_multiplier=0.0))
        assert summary["epsilon"] is None
        assert not json.loads(directory.privacy.read_text())["private"]

    def test_what_only_steps_have_is_at_its_default(self):
        asked = Settings(method="class-means", learning_rate=9.0, max_grad_norm=3.0, conv_ratio=0.5, epochs=7)
        assert asked.relevant().to_dict() == Settings(method="class-means").to_dict()

    @pytest.mark.parametrize("wrong", [0, 257])
    def test_dimensions_out_of_range_are_refused(self, wrong):
        with pytest.raises(SettingsError, match="head_dimensions must be from 1 to 256"):
            Settings(head_dimensions=wrong)

    @pytest.mark.parametrize(
        ("others", "message"),
        [
            ({"model": "model1", "features": None}, "not model1: use model linear"),
            ({"block_size": 8}, "without block_size"),
            ({"ema_decay": 0.9}, "has no ema_decay"),
            ({"unsafe_diagnostics": True}, "has no unsafe_diagnostics"),
            ({"flip": True}, "has no flip"),
            ({"augmentation_multiplicity": 2}, "has no augmentation_multiplicity"),
        ],
    )
    def test_what_has_no_meaning_is_refused(self, tmp_path, others, message):
        with pytest.raises(SettingsError, match=message):
            run(tmp_path, settings(**others))
        assert not (tmp_path / "run" / "config.json").exists()
