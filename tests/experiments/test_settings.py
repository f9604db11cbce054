import pytest

from spectral_dp.experiments.settings import ResolvedSettings, Settings, SettingsError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epochs": 0}, "epochs must be positive, got 0"),
        ({"epsilon": 0}, "epsilon must be positive, got 0"),
        ({"delta": 1}, "delta must be between 0 and 1"),
        ({"conv_ratio": 1}, r"conv_ratio must be in \[0, 1\)"),
        ({"layer_ratios": {"fc1": 2}}, r"fc1 must be in \[0, 1\)"),
        ({"epsilon": 2, "noise_multiplier": 1}, "epsilon or noise_multiplier, not both"),
        ({"layer_max_grad_norms": [1]}, "layer_max_grad_norms needs clipping per_layer, not flat"),
        ({"momentum": 1}, r"momentum must be in \[0, 1\)"),
        ({"noise_multiplier": -1}, "noise_multiplier must be at least 0"),
    ],
)
def test_bad_settings_say_what_is_wrong(given, message):
    with pytest.raises(SettingsError, match=message):
        Settings.from_dict(given)


def test_defaults_that_depend_on_the_method():
    spectral, plain = (Settings(model="tiny", method=method).resolved() for method in ("spectral", "dpsgd"))
    assert (spectral.linear_ratio, spectral.conv_ratio, spectral.block_size, spectral.epsilon) == (0.5, 0.0, 0, 2.0)
    assert plain.linear_ratio == 0.0
    assert Settings(model="tiny", linear_ratio=0.25).resolved().linear_ratio == 0.25
    assert Settings(method="nonprivate", model="tiny").resolved().epsilon is None
    assert Settings(model="tiny", noise_multiplier=1.0).resolved().epsilon is None


def test_what_is_recommended_comes_together_or_not_at_all():
    """Catches filtering with a recommended ratio a layer that the user made block-circulant."""
    recommended = Settings(model="model1").resolved()
    assert (recommended.block_size, recommended.dense_layers, recommended.layer_ratios) == (8, ["fc1"], {"fc1": 0.8})
    chosen = Settings(model="model1", block_size=16).resolved()
    assert (chosen.block_size, chosen.dense_layers, chosen.layer_ratios) == (16, [], {})


def test_resolved_settings_leave_nothing_open():
    """Catches a run whose settings depend on what the defaults are when it is looked at again."""
    resolved = Settings(model="model1").resolved()
    assert Settings.from_dict(resolved.to_dict()).resolved() == resolved
    assert ResolvedSettings.from_dict(resolved.to_dict()) == resolved
    for name in ("block_size", "conv_ratio", "linear_ratio"):
        with pytest.raises(SettingsError, match=f"a file: {name} must be of type"):
            ResolvedSettings.from_dict(resolved.to_dict() | {name: None}, source="a file")
    with pytest.raises(SettingsError, match="method spectral needs an epsilon or a noise_multiplier"):
        ResolvedSettings.from_dict(resolved.to_dict() | {"epsilon": None})


@pytest.mark.parametrize("method", ["spectral", "dpsgd", "nonprivate"])
def test_an_unknown_model_is_found_before_anything_runs(method):
    with pytest.raises(ValueError, match="unknown model 'resnet'"):
        Settings(model="resnet", method=method).resolved()
