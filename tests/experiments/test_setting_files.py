import json
import re

import pytest

from spectral_dp import Relation
from spectral_dp.experiments.setting_files import plain_value, read_file
from spectral_dp.experiments.settings import Settings, SettingsError


def test_settings_survive_a_file(tmp_path):
    settings = Settings(model="lenet5", layer_ratios={"fc1": 0.5}, epsilon=3, relation=Relation.REPLACE_ONE)
    (tmp_path / "config.json").write_text(json.dumps(settings.to_dict()))
    assert Settings.from_dict(read_file(tmp_path / "config.json")) == settings


def test_toml_with_dashes_and_tables(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("batch-size = 64\nlearning_rate = 1\n[layer_ratios]\nfc1 = 0.5\n")
    settings = Settings.from_dict(read_file(path))
    assert (settings.batch_size, settings.learning_rate, settings.layer_ratios) == (64, 1.0, {"fc1": 0.5})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "epochs = = 3", "is not valid TOML"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[1]", "must hold settings by name, got a list"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=message):
        read_file(tmp_path / name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"cannot read the configuration .*gone.toml"):
        read_file(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("views", "augmentation_multiplicity"),
        ("physical-batch-size", "max_physical_batch_size"),
        ("layer_norms", "layer_max_grad_norms"),
        ("average", "ema_decay"),
    ],
)
def test_old_names_are_refused_with_the_new_one(tmp_path, old, new):
    path = tmp_path / "run.toml"
    path.write_text(f"{old} = 2\n")
    message = f"{old.replace('-', '_')} is now {new}: rename it in {path}"
    with pytest.raises(SettingsError, match=re.escape(message)):
        read_file(path)
    with pytest.raises(SettingsError, match=re.escape(message)):
        Settings.from_dict({old: 2}, source=str(path))


@pytest.mark.parametrize(
    ("text", "value"), [(" 3", 3), ("0.5", 0.5), ("true", True), ("[1, 2]", [1, 2]), ("adam ", "adam")]
)
def test_words_need_no_quotes(text, value):
    assert plain_value(text) == value
    assert type(plain_value(text)) is type(value)
