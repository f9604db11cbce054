from dataclasses import fields

import pytest

from spectral_dp.experiments.setting_options import Options
from spectral_dp.experiments.setting_types import SettingsError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epoch": 3}, "unknown settings epoch: choose from dataset"),
        ({"relation": "swap"}, "relation must be one of add_or_remove_one"),
        ({"epochs": 2.5}, "epochs must be of type int, got 2.5"),
        ({"epochs": True}, "epochs must be of type int, got True"),
        ({"epochs": "3"}, "epochs must be of type int"),
        ({"epsilon": float("nan")}, "epsilon must be finite, got nan"),
        ({"layer_ratios": ["fc1"]}, "layer_ratios must map layer names to numbers"),
        ({"layer_max_grad_norms": ["a"]}, "layer_max_grad_norms must be a list of numbers"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite"),
        (
            {"method": "sgd"},
            "method must be one of spectral, dpsgd, opacus, class-means, least-squares, nonprivate, got 'sgd'",
        ),
    ],
)
def test_what_is_no_setting_or_has_another_type_is_refused(given, message):
    with pytest.raises(SettingsError, match=f"a file.*{message}"):
        Options.from_dict(given, source="a file")


def test_lists_of_layers():
    assert Options(dense_layers=["fc1"]).dense_layers == ["fc1"]
    with pytest.raises(SettingsError, match="dense_layers must be a list of layer names"):
        Options.from_dict({"dense_layers": "fc1"})


def test_plain_values_make_the_same_settings_again():
    options = Options(dense_layers=["fc1"], layer_ratios={"fc2": 1}, relation="replace_one")
    assert options.layer_ratios == {"fc2": 1.0}
    assert Options.from_dict(options.to_dict()) == options
    assert options.to_dict().keys() - options.to_dict(without=["seed"]).keys() == {"seed"}


def test_defaults_are_not_shared():
    """Catches a list that one run changes for all later ones."""
    Options().dense_layers.append("fc1")
    assert Options().dense_layers == []


def test_every_setting_says_what_it_is_for():
    for setting in fields(Options):
        assert setting.metadata["help"].endswith((".", ")."))
        assert setting.metadata["group"] in ("Data", "Model", "Privacy", "Spectral-DP", "Training", "Execution")
