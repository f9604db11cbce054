"""Runs that train a part of a pretrained network: what changes, what is said, what is refused, and going on."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file
from tests.support.pretrained import SMALL, small_files

from spectral_dp.audit.checks.neighbours import check_neighbours
from spectral_dp.experiments import trainer
from spectral_dp.experiments.audit_target import target_from_settings
from spectral_dp.experiments.fine_tuning import check_fine_tuning, tuned_network
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.pretrained import NAMES, WeightsError

IMAGES = {"image_size": 16, "train_size": 24, "test_size": 12}


@pytest.fixture
def files(tmp_path, monkeypatch):
    return small_files(tmp_path, monkeypatch)


@pytest.fixture
def reviews(tmp_path):
    lines = ["text,label", *(f"the film was {'good' if n % 2 else 'bad'},{n % 2}" for n in range(30))]
    (tmp_path / "reviews.csv").write_text("\n".join(lines))
    return str(tmp_path / "reviews.csv")


@pytest.fixture
def asked(files):
    def make(model, **others):
        common = {"model": model, "batch_size": 8, "epochs": 1, "reproducible": True, "accountant": "rdp"}
        common |= {"noise_multiplier": 1.0, "learning_rate": 0.1, "delta": 0.01}
        common |= {} if model == "minilm-l6" else IMAGES
        return Settings(**(common | {"weights": str(files[model])} | others)).resolved()

    return make


def made(settings, path, **options):
    directory = RunDirectory(path)
    return trainer.run(settings, directory, **options), directory


def changed(settings, directory):
    """Names of what the run changed, and of what it was to train."""
    torch.manual_seed(settings.seed)
    network = tuned_network(settings, trainer.load_data(settings).classes)
    after, before = load_file(directory.weights), network.state_dict()
    assert set(after) == set(before)
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    return {name for name in after if not torch.equal(after[name], before[name])}, trained


@pytest.mark.parametrize(
    ("model", "tune"),
    [("resnext29", "last-stage"), *(("wrn-28-10", tune) for tune in ("head", "last-stage", "biases", "all"))],
)
def test_a_run_changes_what_is_tuned_and_nothing_else(asked, tmp_path, model, tune):
    settings = asked(model, tune=tune, conv_ratio=0.3)
    summary, directory = made(settings, tmp_path / "run")
    found, trained = changed(settings, directory)
    assert found == trained
    assert summary["epsilon"] > 0
    if tune in ("last-stage", "all"):
        layers = {layer["name"]: layer for layer in json.loads(directory.layers.read_text())}
        assert any(layer["filtered"] and layer["released"] < layer["parameters"] for layer in layers.values())
        assert set(layers) == trained


@pytest.mark.parametrize("tune", ["lora", "biases", "last-stage", "head"])
def test_a_text_encoder_is_tuned(asked, reviews, tmp_path, tune):
    settings = asked("minilm-l6", csv=reviews, tune=tune, method="dpsgd", lora_rank=2, text_length=8)
    _, directory = made(settings, tmp_path / "run")
    found, trained = changed(settings, directory)
    assert found == trained
    assert any(".query.down." in name for name in trained) == (tune == "lora")


def test_the_statement_says_what_is_public_and_what_that_means(asked, tmp_path):
    _, directory = made(asked("wrn-28-10", tune="last-stage", method="dpsgd"), tmp_path / "run")
    stated = json.loads(directory.privacy.read_text())
    assert "who vouches for the data" in stated["pretrained"]
    assert "neither protects those who are in the data of the pretraining" in stated["pretrained"]
    assert stated["trained"] == "its last stage and its head; everything else stays as it was published"


def test_a_run_goes_on_from_its_checkpoint(asked, tmp_path):
    settings = asked("wrn-28-10", tune="last-stage", conv_ratio=0.2, epochs=2)

    def stop(progress):
        if progress.step == 4:
            signal.raise_signal(signal.SIGINT)

    _, whole = made(settings, tmp_path / "whole")
    with pytest.raises(trainer.Interrupted):
        made(settings, tmp_path / "parts", show=stop)
    _, resumed = made(settings, tmp_path / "parts", resume=True)
    theirs, ours = load_file(whole.weights), load_file(resumed.weights)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert json.loads(whole.privacy.read_text())["epsilon"] == json.loads(resumed.privacy.read_text())["epsilon"]


def test_heads_of_the_paper_are_block_circulant_and_filtered(asked, tmp_path):
    settings = asked("wrn-28-10", tune="last-stage", head="transfer2")
    assert settings.layer_ratios == {"fc.fc1": 0.5, "fc.fc2": 0.2}
    assert settings.conv_ratio == 0.2
    network = tuned_network(settings, 10)
    assert [m.block_size for m in network.fc.modules() if isinstance(m, BlockCirculantLinear)] == [16, 10]
    assert not any(isinstance(m, BlockCirculantLinear) for name, m in network.named_modules() if "fc" not in name)
    _, directory = made(settings, tmp_path / "run")
    released = {layer["name"]: layer["filtered"] for layer in json.loads(directory.layers.read_text())}
    assert released["fc.fc1.weight"]
    assert released["fc.fc2.weight"]


def test_without_privacy_and_with_an_average_of_weights(asked, tmp_path):
    settings = asked("wrn-28-10", method="nonprivate", noise_multiplier=None, ema_decay=0.5)
    assert settings.tune == "last-stage"
    summary, directory = made(settings, tmp_path / "run")
    assert summary["epsilon"] is None
    found, trained = changed(settings, directory)
    assert found <= trained
    assert "fc.weight" in found


@pytest.mark.parametrize(
    ("model", "others", "message"),
    [
        (
            "wrn-28-10",
            {"tune": "lora"},
            "tune lora adds to attention, which wrn-28-10 does not have: use it with minilm-l6",
        ),
        ("wrn-28-10", {"features": "pixels"}, "leave out features pixels, or train a head"),
        ("wrn-28-10", {"method": "class-means"}, "method class-means does not fine-tune"),
        ("wrn-28-10", {"method": "opacus"}, "method opacus does not fine-tune"),
        ("wrn-28-10", {"block_size": 8}, "give head transfer1, transfer2 or transfer3"),
        ("minilm-l6", {"flip": True, "image_size": 8}, "leave out flip, image_size"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_anything_is_read(asked, model, others, message):
    settings = asked(model, **others)
    with pytest.raises(SettingsError, match=message):
        check_fine_tuning(settings)
    with pytest.raises(SettingsError, match=message):
        trainer.load_data(settings)


def test_texts_are_not_for_networks_on_images_nor_the_other_way_round(asked, reviews):
    with pytest.raises(SettingsError, match="csv has texts, which wrn-28-10 does not read: use minilm-l6"):
        trainer.load_data(asked("wrn-28-10", csv=reviews, image_size=None, train_size=None, test_size=None))
    with pytest.raises(SettingsError, match="digits has images, which minilm-l6 does not read: use resnet18"):
        trainer.load_data(asked("minilm-l6"))


def test_weights_of_another_network_are_refused(asked, files):
    settings = asked("wrn-28-10", weights=str(files["resnext29"]))
    with pytest.raises(WeightsError, match="does not hold weights of wrn-28-10"):
        tuned_network(settings, 10)


@pytest.mark.parametrize("others", [{"tune": "head"}, {"weights": "x"}, {"head": "transfer1"}, {"lora_rank": 4}])
def test_options_of_pretrained_models_are_refused_for_others(others):
    with pytest.raises(SettingsError, match=f"{next(iter(others))}: only for a pretrained model .*, not for model1"):
        Settings(**others).resolved()


def test_every_pretrained_network_is_a_model():
    assert set(SMALL) <= set(NAMES)
    for name in NAMES:
        assert Settings(model=name).resolved().tune == "last-stage"


def test_the_step_of_a_tuned_network_is_audited(asked, few_batches):
    settings = asked("wrn-28-10", tune="last-stage", conv_ratio=0.2, image_size=8)
    target = target_from_settings(settings)
    trained = {name for name, parameter in target._template.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"block3", "bn1", "fc"}
    verdicts = list(check_neighbours(target, torch.Generator().manual_seed(0)))
    assert verdicts
    assert all(verdict.ok for verdict in verdicts), verdicts
    with pytest.raises(SettingsError, match="audit the head on its features"):
        target_from_settings(asked("minilm-l6"))
