"""From settings to features: stages in their order, shapes without data, deployment, and what the statement says."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.support.pretrained import weights_content

from spectral_dp import audit
from spectral_dp.data import load_dataset
from spectral_dp.experiments import feature_data, trainer
from spectral_dp.experiments.audit_target import target_from_settings
from spectral_dp.experiments.feature_stages import (
    deployed_network,
    feature_facts,
    feature_shape,
    is_filtered_in_cache,
    stages_of,
    trained_views,
)
from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.features import FeatureError, Prepared, Projected, Weighted

#: For training steps, whose audit has its own doubles in ``tests/audit``: here it is to run through, and to pass.
LIGHT = audit.Effort(1, canary_blocks=2, per_block=4, scores=300, run_scores=10, steps=5, noise_steps=8, calls=20)


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path_factory.getbasetemp() / "features-of-digits"))  # shared


def settings(**others):
    common = {
        "model": "linear",
        "features": "tests.support.extractors:edges",
        "method": "dpsgd",
        "epochs": 4,
        "batch_size": 256,
        "epsilon": 3.0,
        "delta": 1e-4,
        "max_grad_norm": 0.1,
        "learning_rate": 4.0,
        "reproducible": True,
        "threads": 1,
        "feature_prior_images": 300,
    }
    return Settings(**(common | others)).resolved()


PROJECTIONS = {
    "all numbers": ({"feature_rank": 40}, (40,)),
    "of cosines": ({"feature_rank": 10, "feature_ratio": 0.5}, (10,)),
    "averaged, normalised": (
        {"feature_rank": 40, "feature_norm": "group", "feature_groups": 2, "mirror_average": True},
        (40,),
    ),
    "square roots": ({"feature_rank": 40, "feature_exponent": 0.5}, (40,)),
    "not of unit length": ({"feature_rank": 40, "feature_length": "none"}, (40,)),
    "channels": ({"feature_channels": 3, "model": "cnn"}, (3, 7, 7)),
    "standardised channels": ({"feature_channels": 3, "model": "cnn", "feature_norm": "public"}, (3, 7, 7)),
    "no projection": ({}, (4, 7, 7)),
    "unit length only": ({"feature_length": "unit"}, (4, 7, 7)),
}


@pytest.mark.parametrize(("options", "shape"), PROJECTIONS.values(), ids=PROJECTIONS)
def test_shapes_are_known_without_data(options, shape):
    chosen = settings(**options)
    assert feature_shape(chosen, (1, 8, 8)) == shape
    assert feature_data.load_features(chosen).input_shape == shape


def test_shapes_need_no_spectrum(monkeypatch):
    """An audit asks for the shape of what is read, of a run that may be large."""
    monkeypatch.setattr("spectral_dp.features.generated_spectrum", None)
    assert feature_shape(settings(feature_rank=40), (1, 8, 8)) == (40,)


def test_stages_come_in_their_order():
    chosen = settings(feature_rank=5, feature_norm="group", feature_groups=2, feature_power=0.6, feature_damp=0.01)
    first, second, third = stages_of(chosen)
    assert first == Prepared(2)
    assert second == Projected(second.spectrum, 5)
    assert third == Weighted(second.spectrum, 0.6, 0.01, unit=True)
    assert stages_of(settings()) == []
    assert stages_of(settings(feature_length="unit")) == [Prepared(unit=True)]


def test_other_gains_need_no_other_projection():
    """Projecting a large data set takes minutes, and gains are what one tries first."""
    one, other = (stages_of(settings(feature_rank=5, feature_power=power)) for power in (0.5, 0.6))
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1]


@pytest.mark.parametrize(("options", "_"), PROJECTIONS.values(), ids=PROJECTIONS)
def test_the_deployed_network_has_the_outputs_of_the_cached_path(tmp_path, options, _):
    chosen, directory = settings(**options), RunDirectory(tmp_path / "run")
    trainer.run(chosen, directory)
    data = feature_data.load_features(chosen)
    head = build_network(chosen, data.input_shape, 10)
    head.load_state_dict(load_file(directory.weights))
    cached = head(data.normalise(data.test_images[:50]))
    outputs = deployed_network(chosen, head)(load_dataset("digits").test_images[:50])
    assert torch.allclose(outputs, cached, atol=5e-3 * cached.abs().max().item())


def test_projected_features_learn_privately(tmp_path):
    summary, directory = (run := RunDirectory(tmp_path / "run")) and (trainer.run(settings(feature_rank=40), run), run)
    assert summary["heldout_accuracy"] > 0.7
    stated = json.loads(directory.privacy.read_text())
    assert "40 coordinates" in stated["projection"]
    assert "nothing of it is released or charged" in stated["projection"]


def test_a_projection_makes_it_spectral(tmp_path, recwarn):
    """Catches the warning that nothing is filtered: the filter is in the features."""
    chosen = settings(method="spectral", feature_rank=40, epochs=1)
    assert is_filtered_in_cache(chosen)
    trainer.run(chosen, RunDirectory(tmp_path / "run"))
    assert not [w for w in recwarn if "plain DP-SGD" in str(w.message)]


@pytest.mark.parametrize("options", [{"feature_rank": 40}, {"feature_channels": 3, "model": "cnn"}])
@pytest.mark.filterwarnings("ignore:some contributions")
def test_heads_on_projected_features_can_be_audited(options, few_batches):
    report = audit.run_audit(
        target_from_settings(settings(**options, batch_size=16)), effort=LIGHT, confidence=0.999, seed=0
    )
    assert report.ok, report.violations


def test_a_backbone_trains_a_head_and_the_statement_says_whose_it_is(tmp_path):
    (tmp_path / "mine.safetensors").write_bytes(weights_content("mobilenet-v2"))
    options = {"weights": str(tmp_path / "mine.safetensors"), "image_size": 16}
    chosen = settings(features="mobilenet-v2", feature_options=options, epochs=1)
    assert feature_shape(chosen, (1, 8, 8)) == (1280,)
    trainer.run(chosen, RunDirectory(tmp_path / "run"))
    said = json.loads((tmp_path / "run" / "privacy.json").read_text())["features"]
    for fact in ("mobilenet-v2", "who vouches for the data", "taken to be public", "neither protects those"):
        assert fact in said


@pytest.mark.parametrize("front_end", ["scattering", "patches"])
def test_the_statement_says_that_images_are_made_upright(front_end):
    pytest.importorskip("kymatio")
    plain, straight = (
        feature_facts(settings(features=front_end, feature_options={"upright": is_upright}))["features"]
        for is_upright in (False, True)
    )
    assert "each image is centred and made upright by itself" in straight
    assert "upright" not in plain


def test_models_of_images_have_no_facts():
    chosen = Settings(model="model1").resolved()
    assert feature_facts(chosen) == {}
    assert not is_filtered_in_cache(chosen)
    assert feature_shape(chosen, (1, 8, 8)) == (1, 8, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_rank": 5, "feature_channels": 2}, "give one"),
        ({"feature_rank": 5, "feature_norm": "private"}, "use feature_norm group or none"),
        ({"feature_gains": "private"}, "give feature_rank"),
        ({"feature_gains": "private", "feature_rank": 5, "features": None, "model": "model1"}, "reads images"),
        ({"feature_gains": "private", "feature_channels": 2, "model": "cnn"}, "give feature_rank"),
        ({"feature_length": "unit", "feature_norm": "public"}, "use feature_norm group or none"),
        ({"feature_exponent": 0.5, "feature_norm": "public"}, "or public with a projection"),
        ({"feature_exponent": 0.5, "feature_norm": "private"}, "use feature_norm group or none"),
        ({"feature_exponent": 0.0}, "feature_exponent must be above 0 and at most 1"),
        ({"feature_channels": 3, "model": "scatter-cnn"}, "use the model cnn, the form for colour"),
        ({"feature_rank": 0}, "feature_rank must be positive"),
        ({"feature_power": -1.0}, "feature_power must be at least 0"),
        ({"feature_damp": 0.0}, "feature_damp must be positive"),
        ({"features": None}, "linear reads features: say which with features, one of scattering"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        settings(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_rank": 400}, "at most 196 directions, not 400: lower the rank"),
        ({"feature_channels": 3, "feature_ratio": 0.5}, "leave feature_channels out"),
        ({"feature_prior": "photographs", "feature_rank": 5}, "unknown prior 'photographs'"),
        ({"features": "wavelets"}, "unknown features 'wavelets'"),
        ({"feature_options": {"depth": 2}}, "no option depth"),
    ],
)
def test_features_that_there_are_not_are_refused(options, message):
    with pytest.raises((FeatureError, ValueError), match=message):
        feature_data.load_features(settings(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": 2}, "cannot be shifted any more: leave shift 2 out"),
        ({"augmentation_multiplicity": 3}, "features of 2 views .* so it can be 2 at most"),
        ({"flip": True, "mirror_average": True}, "leave one of them out"),
    ],
)
def test_views_that_are_not_cached_are_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        trained_views(settings(**options))
