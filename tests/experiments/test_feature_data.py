"""Runs on cached features: what they read, and the private statistics as a release of the run."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from tests.support import broken_statistics

from spectral_dp import Relation, audit
from spectral_dp.accounting import Ledger
from spectral_dp.experiments import feature_data, feature_stages, trainer
from spectral_dp.experiments.audit_target import statistics_target, target_from_run, target_from_settings
from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.experiments.spectral import spectral_config
from spectral_dp.features.normalization import release_moments
from spectral_dp.mechanism.filters import IdentityFilter
from spectral_dp.mechanism.noise import SeededNoise

pytest.importorskip("kymatio")

EFFORT = audit.Effort(2, canary_blocks=2, per_block=8, scores=2000, run_scores=50, steps=5, noise_steps=20, calls=50)
#: For training steps, whose audit has its own doubles in ``tests/audit``: here it is to run through, and to pass.
LIGHT = audit.Effort(1, canary_blocks=2, per_block=4, scores=300, run_scores=10, steps=5, noise_steps=8, calls=20)


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path_factory.getbasetemp() / "features-of-digits"))  # shared


def settings(**others):
    common = {
        "model": "scatter-linear",
        "method": "dpsgd",
        "epochs": 2,
        "batch_size": 256,
        "epsilon": 3.0,
        "delta": 1e-4,
        "max_grad_norm": 0.1,
        "learning_rate": 4.0,
        "reproducible": True,
        "threads": 1,
    }
    return Settings(**(common | others)).resolved()


def run(tmp_path, chosen, name="run", **options):
    directory = RunDirectory(tmp_path / name)
    return trainer.run(chosen, directory, **options), directory


class TestWhatIsRead:
    @pytest.mark.parametrize(
        ("options", "shape"),
        [
            ({}, (81, 2, 2)),
            ({"feature_norm": "none"}, (81, 2, 2)),
            ({"method": "spectral", "feature_ratio": 0.5}, (81, 1)),
            ({"mirror_average": True}, (81, 2, 2)),
        ],
    )
    def test_shapes_are_known_without_data(self, options, shape):
        chosen = settings(**options)
        assert feature_stages.feature_shape(chosen, (1, 8, 8)) == shape
        assert feature_data.load_features(chosen).input_shape == shape

    def test_models_of_images_read_images(self):
        chosen = settings(model="model1")
        assert not feature_stages.reads_features(chosen)
        assert feature_stages.feature_shape(chosen, (1, 8, 8)) == (1, 8, 8)

    @pytest.mark.parametrize("model", ["linear", "tests.support.extractors:vector_head"])
    def test_any_features_go_the_same_way(self, tmp_path, model):
        """A front end that nobody registered, vectors, a head of one's own: from settings to a statement."""
        chosen = settings(
            model=model, features="tests.support.extractors:pooled", feature_options={"cells": 4}, epochs=8
        )
        assert feature_stages.feature_shape(chosen, (1, 8, 8)) == (16,)
        summary, directory = run(tmp_path, chosen)
        assert summary["heldout_accuracy"] > 0.3
        stated = json.loads(directory.privacy.read_text())
        assert "vouches" in stated["features"]
        assert "computing them releases nothing, and nothing is charged" in stated["features"]

    def test_the_convolutional_head_reads_any_maps(self):
        chosen = settings(model="cnn", features="tests.support.extractors:doubled")
        assert feature_stages.feature_shape(chosen, (1, 8, 8)) == (2, 8, 8)
        assert feature_data.load_features(chosen).input_shape == (2, 8, 8)

    def test_groups_must_be_said_where_the_features_have_no_default(self):
        chosen = settings(model="linear", features="tests.support.extractors:pooled", feature_norm="group")
        with pytest.raises(SettingsError, match="give feature_groups"):
            feature_data.load_features(chosen)

    @pytest.mark.parametrize("norm", ["public", "private"])
    def test_vectors_are_normalised_by_coordinate(self, tmp_path, norm):
        chosen = settings(model="linear", features="tests.support.extractors:pooled", feature_norm=norm)
        summary, _ = run(tmp_path, chosen)
        assert summary["heldout_accuracy"] > 0.3

    def test_validation_is_held_out(self):
        data = feature_data.load_features(settings(validation_size=100, test_size=50))
        assert (len(data.train_images), len(data.test_images)) == (1337, 50)

    def test_views_are_those_of_the_mirror_image(self):
        plain, both = (feature_data.load_features(settings(**options)) for options in ({}, {"flip": True}))
        assert (plain.train_images.shape, both.train_images.shape) == ((1437, 81, 2, 2), (1437, 2, 81, 2, 2))
        assert plain.input_shape == both.input_shape == (81, 2, 2)
        assert torch.equal(both.train_images[:9][:, 0], plain.train_images[:9])
        assert not torch.equal(both.train_images[:9][:, 1], plain.train_images[:9])
        assert both.test_images.shape == plain.test_images.shape == (360, 81, 2, 2)

    def test_what_is_held_out_is_not_augmented(self):
        data = feature_data.load_features(settings(validation_size=100, augmentation_multiplicity=2))
        assert (data.train_images.shape, data.test_images.shape) == ((1337, 2, 81, 2, 2), (100, 81, 2, 2))

    def test_features_learn(self, tmp_path):
        summary, _ = run(tmp_path, settings(method="nonprivate", learning_rate=0.5, epochs=8, batch_size=64))
        assert summary["heldout_accuracy"] > 0.95

    def test_dropped_cosines_make_it_spectral(self, tmp_path, recwarn):
        """Catches the warning that nothing is filtered: the filter is in the features."""
        run(tmp_path, settings(method="spectral", feature_ratio=0.5))
        assert not [w for w in recwarn if "plain DP-SGD" in str(w.message)]


class TestViews:
    """Cached views as augmentation: the gradients of a record's views are averaged before the clip."""

    @pytest.mark.parametrize("model", ["scatter-linear", "scatter-cnn"])
    @pytest.mark.parametrize("augmented", [{"augmentation_multiplicity": 2}, {"flip": True}])
    def test_train(self, tmp_path, model, augmented):
        summary, _ = run(tmp_path, settings(model=model, epochs=6, **augmented))
        assert summary["heldout_accuracy"] > 0.5
        assert summary["epsilon"] <= 3.0

    @pytest.mark.parametrize("augmented", [{"augmentation_multiplicity": 2}, {"flip": True}])
    def test_parts_of_a_batch_do_not_matter(self, tmp_path, augmented):
        """Catches views that are paired with other records when a batch comes in parts."""
        weights = []
        for physical in (None, 37):
            chosen = settings(max_physical_batch_size=physical, **augmented)
            weights.append(load_file(run(tmp_path, chosen, f"by-{physical}")[1].weights)["fc.weight"])
        assert torch.allclose(*weights, atol=1e-5)

    def test_gradients_are_averaged_over_views_before_the_clip(self, tmp_path):
        """The first step without noise, by hand. Catches views that count as records, or are clipped one by one."""
        chosen = settings(
            augmentation_multiplicity=2,
            noise_multiplier=0.0,
            epsilon=None,
            max_grad_norm=0.5,
            learning_rate=1.0,
            epochs=1,
            batch_size=1437,
        )
        with pytest.warns(RuntimeWarning, match="noise_multiplier is 0"):
            _, directory = run(tmp_path, chosen)
        data = feature_data.load_features(chosen)
        x = data.train_images[:].double().mean(1).flatten(1)  # the head begins at zero: both views have the same errors
        errors = 0.1 - torch.nn.functional.one_hot(data.train_labels, 10).double()
        norms = errors.norm(dim=1) * (x.square().sum(1) + 1).sqrt()
        expected = -(errors * (0.5 / norms).clamp(max=1)[:, None]).T @ x / 1437
        found = load_file(directory.weights)["fc.weight"].double()
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())

    def test_without_privacy_and_by_opacus(self, tmp_path):
        for method in ("nonprivate", "opacus"):
            chosen = settings(method=method, flip=True, learning_rate=0.5, epochs=1)
            assert run(tmp_path, chosen, method)[0]["heldout_accuracy"] > 0.2


RATIOS = {
    "kernels": {"conv_ratio": 0.5},
    "one kernel": {"layer_ratios": {"conv1": 0.5}},
    "each": {"layer_ratios": {"conv1": 0.25, "conv2": 0.5, "fc1": 0.5}},
    "dense": {"layer_ratios": {"fc1": 0.5}},
}


class TestFilteredHeads:
    """The convolutional head with filters on its kernels, on its dense layer, and with averaged weights."""

    @pytest.mark.parametrize("ratios", RATIOS.values(), ids=RATIOS)
    @pytest.mark.parametrize("dataset", ["mnist", "cifar10"])
    def test_both_forms_have_layers_to_filter(self, dataset, ratios):
        chosen = settings(model="scatter-cnn", method="spectral", dataset=dataset, **ratios)
        shape = feature_stages.feature_shape(chosen, feature_stages.image_shape(chosen))
        head = build_network(chosen, shape, 10)
        filtered = spectral_config(chosen, head, 10).layer_configs(head)
        expected = set(ratios.get("layer_ratios", {"conv1": 0, "conv2": 0}))
        assert {name for name, config in filtered.items() if config.filter != IdentityFilter()} == expected

    @pytest.mark.parametrize("ratios", RATIOS.values(), ids=RATIOS)
    def test_train(self, tmp_path, ratios):
        chosen = settings(
            model="scatter-cnn", method="spectral", image_size=16, train_size=400, test_size=100, **ratios
        )
        summary, directory = run(tmp_path, chosen)
        layers = {layer["name"]: layer for layer in json.loads(directory.layers.read_text())}
        for name in ratios.get("layer_ratios", ["conv1", "conv2"]):
            assert layers[f"{name}.weight"]["released"] < layers[f"{name}.weight"]["parameters"]
        assert summary["epsilon"] <= 3.0

    def test_the_head_of_mnist_learns(self, tmp_path):
        """81 maps of 7 x 7: the form with two dense layers."""
        chosen = settings(model="scatter-cnn", image_size=28, epochs=8, learning_rate=2.0, momentum=0.9, batch_size=200)
        summary, directory = run(tmp_path, chosen)
        assert load_file(directory.weights)["fc1.weight"].shape == (32, 512)
        assert summary["heldout_accuracy"] > 0.7

    @pytest.mark.parametrize("model", ["scatter-linear", "scatter-cnn"])
    def test_averaged_weights_are_the_result(self, tmp_path, model):
        last, averaged = (run(tmp_path, settings(model=model, ema_decay=d), f"ema-{d}") for d in (0.0, 0.9))
        weights = [load_file(directory.weights) for _, directory in (last, averaged)]
        assert weights[0].keys() == weights[1].keys()
        assert not any(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert last[0]["epsilon"] == averaged[0]["epsilon"]


class TestPrivateStatistics:
    def test_are_charged_to_the_same_ledger_within_the_same_budget(self, tmp_path):
        chosen = settings(feature_norm="private", feature_noise_multiplier=10.0)
        summary, directory = run(tmp_path, chosen)
        ledger = _ledger(directory)
        assert ledger.phases[0] == (10.0, 1.0, 1)
        assert ledger.phases[1].steps == summary["steps"]
        assert summary["epsilon"] == pytest.approx(ledger.epsilon(1e-4), rel=1e-9)
        assert 2.98 < summary["epsilon"] <= 3.0
        alone = settings()
        assert summary["noise_multiplier"] > run(tmp_path, alone, "alone")[0]["noise_multiplier"]

    @pytest.mark.parametrize("mirror", [False, True])
    @pytest.mark.parametrize("ratio", [None, 0.5])
    def test_are_of_the_maps_that_the_head_reads_and_of_training_records_alone(self, mirror, ratio):
        """Catches statistics of held-out records, and of maps that are not averaged over views where the head's are."""
        part = {"validation_size": 200, "train_size": 900, "mirror_average": mirror}
        chosen = settings(feature_norm="private", method="spectral", feature_ratio=ratio, **part)
        read = feature_data.load_features(settings(feature_norm="none", **part)).train_images
        released = feature_data.statistics_release(chosen, _head(), feature_data.load_features(chosen))
        assert torch.equal(released.maps[:], read[:])

    @pytest.mark.parametrize("reproducible", [False, True])
    def test_noise_is_secret_unless_the_run_is_reproducible(self, monkeypatch, reproducible):
        """Catches noise that whoever knows the seed can take off, and noise that comes again in the first step."""
        sources = []

        def listen(rows, public, *, noise, **_):
            sources.append(noise)
            return public

        monkeypatch.setattr(feature_data.normalization, "private_channel_statistics", listen)
        chosen = settings(feature_norm="private", reproducible=reproducible, seed=3)
        head = feature_data.with_normalization(chosen, _head(), (81, 2, 2))
        for _ in range(2):
            feature_data.statistics_release(chosen, head, feature_data.load_features(chosen)).release(Ledger())
        one, two = (source.normal((8,)) for source in sources)
        assert [source.is_private for source in sources] == [not reproducible] * 2
        assert torch.equal(one, two) is reproducible
        assert not torch.equal(one, SeededNoise(3, reproducibility_over_privacy=True).normal((8,)))

    def test_are_listed_in_the_statement(self, tmp_path):
        _, directory = run(tmp_path, settings(feature_norm="private"))
        stated = json.loads(directory.privacy.read_text())
        assert "noise multiplier 20" in stated["normalisation"]
        assert "normalisation" in (directory.path / "privacy.md").read_text()

    @pytest.mark.filterwarnings("ignore:this process has made steps")
    def test_a_resumed_run_does_not_release_them_again(self, tmp_path):
        """Catches spending twice, and going on with other statistics than training began with."""
        chosen = settings(feature_norm="private", epochs=3, ema_decay=0.5)
        whole, at_once = run(tmp_path, chosen, "whole")
        stopped = RunDirectory(tmp_path / "stopped")
        steps = []

        def stop(progress):
            steps.append(progress.step)
            if progress.step == 8:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            trainer.run(chosen, stopped, show=stop)
        resumed = trainer.run(chosen, stopped, resume=True)
        assert _ledger(stopped).phases == _ledger(at_once).phases
        assert resumed["epsilon"] == whole["epsilon"]
        assert stopped.weights.read_bytes() == at_once.weights.read_bytes()

    def test_are_part_of_the_model(self, tmp_path):
        _, directory = run(tmp_path, settings(feature_norm="private"))
        released = load_file(directory.weights)
        public = feature_data.with_normalization(settings(feature_norm="public"), _head(), (81, 2, 2)).normalization
        assert not torch.allclose(released["normalization.mean"], public.mean)

    @pytest.mark.parametrize("method", ["nonprivate", "opacus"])
    @pytest.mark.parametrize("which", [{"feature_norm": "private"}, {"feature_gains": "private", "feature_rank": 20}])
    def test_need_a_ledger_of_ours(self, tmp_path, method, which):
        with pytest.raises(SettingsError, match="no ledger for private statistics"):
            run(tmp_path, settings(method=method, feature_prior_images=300, **which))

    def test_of_axes_are_charged_and_listed(self, tmp_path):
        """Catches gains from records that are not released: they are within the budget, and in the statement."""
        axes = {"feature_rank": 20, "feature_prior_images": 300}
        summary, directory = run(tmp_path, settings(feature_gains="private", feature_noise_multiplier=10.0, **axes))
        ledger = _ledger(directory)
        assert ledger.phases[0] == (10.0, 1.0, 1)
        assert summary["epsilon"] == pytest.approx(ledger.epsilon(1e-4), rel=1e-9)
        assert 2.98 < summary["epsilon"] <= 3.0
        stated = json.loads(directory.privacy.read_text())
        assert "mean and deviation of every axis of the features" in stated["normalisation"]
        assert "statistics of them are released and charged" in stated["features"]
        assert "with gains" not in stated["projection"]
        own = load_file(directory.weights)["normalization.std"]
        generated = feature_data.with_normalization(settings(feature_gains="private", **axes), _head(), (20,))
        assert not torch.allclose(own, generated.normalization.std, rtol=0.05)
        assert len(_ledger(run(tmp_path, settings(**axes), "generated")[1]).phases) == 1

    def test_of_axes_are_of_the_coordinates_that_the_head_reads(self):
        """Catches statistics of held-out records, or of features before their projection."""
        axes = {"feature_rank": 20, "feature_prior_images": 300, "feature_norm": "none", "feature_ratio": 0.5}
        chosen = settings(feature_gains="private", validation_size=200, flip=True, **axes)
        read = feature_data.load_features(chosen)
        released = feature_data.statistics_release(chosen, _head(), read)
        assert released.maps.shape == (len(read.train_images), 20)
        assert torch.equal(released.maps[:], read.train_images[:][:, 0])

    def test_public_ones_cost_nothing(self, tmp_path):
        _, directory = run(tmp_path, settings(feature_norm="public"))
        assert len(_ledger(directory).phases) == 1


#: Sixteen features rather than 81 maps: an audit takes the longer the more numbers there are to look at.
FEW = {"model": "linear", "features": "tests.support.extractors:pooled", "feature_options": {"cells": 4}}


@pytest.mark.usefixtures("few_batches")
class TestAudit:
    def report(self, release=release_moments, **others):
        chosen = settings(feature_norm="private", feature_noise_multiplier=2.0, **others)
        return audit.run_audit(statistics_target(chosen, release), effort=EFFORT, confidence=0.999, seed=0)

    @pytest.mark.parametrize("relation", list(Relation))
    def test_the_release_holds(self, relation):
        report = self.report(relation=relation)
        assert report.ok, report.violations

    @pytest.mark.parametrize("double", broken_statistics.BROKEN, ids=lambda double: double.__name__)
    def test_doubles_with_one_fault_each_are_caught(self, double):
        expected = broken_statistics.BROKEN[double]
        found = {verdict.audit for verdict in self.report(double, **FEW).violations}
        assert expected in found
        assert (expected == "accounting") == (found == {"accounting"})

    @pytest.mark.parametrize("double", broken_statistics.REPLACE_ONE, ids=lambda double: double.__name__)
    def test_noise_for_other_neighbours_is_caught(self, double):
        found = {verdict.audit for verdict in self.report(double, relation="replace_one", **FEW).violations}
        assert broken_statistics.REPLACE_ONE[double] in found
        assert self.report(double, **FEW).ok

    def test_a_run_whose_statement_leaves_them_out_is_caught(self, tmp_path):
        """Its epsilon is that of the training steps alone."""
        chosen = settings(feature_norm="private", feature_noise_multiplier=5.0, reproducible=False)
        _, directory = run(tmp_path, chosen)
        claim = target_from_run(directory.path).claim
        assert claim.total_epsilon <= claim.stated_epsilon * 1.001
        forgotten = dataclasses.replace(claim, stated_epsilon=claim.epsilon)
        assert forgotten.total_epsilon > 1.01 * forgotten.stated_epsilon

    def test_other_runs_have_none(self):
        assert statistics_target(settings()) is None

    @pytest.mark.parametrize("model", ["scatter-linear", "scatter-cnn"])
    def test_the_heads_can_be_audited(self, model):
        target = target_from_settings(settings(model=model, method="spectral", linear_ratio=0.5, batch_size=16))
        report = audit.run_audit(target, effort=LIGHT, confidence=0.999, seed=0)
        assert report.ok, report.violations


def _ledger(directory):
    from spectral_dp.training import checkpoint

    return Ledger.from_state_dict(checkpoint.load(directory.checkpoint)["ledger"])


def _head():
    from spectral_dp.models import ScatterLinear

    return ScatterLinear((81, 2, 2), 10)
