"""From settings or a run directory to what is audited."""

import json

import pytest
from torch import nn

from spectral_dp import audit
from spectral_dp.experiments.audit_target import claim_from_settings, target_from_run, target_from_settings
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.layers import BlockCirculantLinear

SMALL = {"model": "lenet5", "image_size": 12, "batch_size": 64, "epochs": 2, "epsilon": 3.0, "delta": 1e-4}


def test_the_claim_is_that_of_training():
    claim = claim_from_settings(Settings.from_dict(SMALL).resolved())
    assert claim.sample_rate == pytest.approx(64 / 1437)
    assert claim.steps == 2 * 23
    assert claim.epsilon <= claim.stated_epsilon == 3.0
    assert claim.epsilon == pytest.approx(3.0, rel=1e-2)


def test_given_noise_and_number_of_samples():
    claim = claim_from_settings(
        Settings.from_dict({"noise_multiplier": 1.5, "max_grad_norm": 0.5, "batch_size": 100}).resolved(), 1000
    )
    assert (claim.noise_multiplier, claim.max_grad_norm, claim.sample_rate) == (1.5, 0.5, 0.1)
    assert claim.stated_epsilon is None


@pytest.mark.parametrize("validation", [0, 100])
def test_a_part_of_the_data_set(validation):
    settings = Settings.from_dict({**SMALL, "validation_size": validation}).resolved()
    assert claim_from_settings(settings).sample_rate == pytest.approx(64 / (1437 - validation))


def test_model_and_filters_are_those_of_training():
    settings = Settings.from_dict({**SMALL, "block_size": 4, "conv_ratio": 0.5, "clipping": "per_layer"}).resolved()
    target = target_from_settings(settings)
    assert isinstance(target, audit.SpectralTarget)
    model = target._template
    assert isinstance(model.fc1, BlockCirculantLinear)
    gains = [rule.gains for block in target._chosen.optimizer.gradients.blocks for _, rule in block]
    assert gains[0].count < 25
    assert "PerLayerClipping" in repr(target._chosen.optimizer.clipping)


def test_layers_that_stay_dense_are_dense_in_the_audit():
    """Catches auditing another network than was trained."""
    target = target_from_settings(
        Settings.from_dict({"model": "model1", "batch_size": 64, "noise_multiplier": 1.0}).resolved()
    )
    assert isinstance(target._template.fc1, nn.Linear)
    assert isinstance(target._template.fc2, BlockCirculantLinear)


def test_bounds_of_single_layers():
    bounds = [0.1, 0.2, 0.3, 0.4, 0.5]
    settings = Settings.from_dict({**SMALL, "clipping": "per_layer", "layer_max_grad_norms": bounds}).resolved()
    target = target_from_settings(settings)
    assert target.claim.max_grad_norm == pytest.approx(0.55**0.5)
    assert "0.5" in repr(target._chosen.optimizer.clipping)


def test_opacus():
    pytest.importorskip("opacus")
    assert isinstance(
        target_from_settings(Settings.from_dict({**SMALL, "method": "opacus"}).resolved()), audit.OpacusTarget
    )


def test_refusals():
    with pytest.raises(SettingsError, match="claims no privacy"):
        target_from_settings(Settings.from_dict({"method": "nonprivate"}).resolved())
    with pytest.raises(SettingsError, match="exceeds the 10 training samples"):
        claim_from_settings(Settings.from_dict(SMALL).resolved(), 10)


def write_run(directory, **stated):
    facts = {"noise_multiplier": 1.3, "sample_rate": 0.1, "steps": 20, "epsilon": 9.0} | stated
    (directory / "config.json").write_text(json.dumps(Settings.from_dict(SMALL).resolved().to_dict()))
    (directory / "privacy.json").write_text(json.dumps(facts))
    return directory


def test_a_run_is_held_to_its_privacy_statement(tmp_path):
    claim = target_from_run(write_run(tmp_path)).claim
    assert (claim.noise_multiplier, claim.sample_rate, claim.steps, claim.stated_epsilon) == (1.3, 0.1, 20, 9.0)


def test_no_run(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        target_from_run(tmp_path)
