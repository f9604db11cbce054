"""Where records come from, and runs on a user's own images and texts from end to end."""

import json
import os

import pytest
from PIL import Image

from spectral_dp.data import DataError, ImageDataset, TextDataset
from spectral_dp.experiments import trainer
from spectral_dp.experiments.audit_target import claim_from_settings, target_from_settings
from spectral_dp.experiments.data_source import load_images, load_records, records_info
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import Settings, SettingsError
from spectral_dp.features import FeatureError


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    for number in range(40):
        for name, colour in (("dark", 30), ("light", 220)):
            place = tmp_path / "mine" / name
            place.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8 + number % 2, 8), (colour + number // 2,) * 3).save(place / f"{number}.png")
    return str(tmp_path / "mine")


@pytest.fixture
def texts(tmp_path):
    words = {"good": "a lovely film with great actors", "bad": "a terrible bore and awful acting"}
    rows = [f"{label},{words[label]} number {i}" for i in range(100) for label in words]
    (tmp_path / "mine.csv").write_text("\n".join(["stars,review", *rows]))
    return {"csv": str(tmp_path / "mine.csv"), "text_column": "review", "label_column": "stars"}


def settings(**others):
    common = {"model": "linear", "method": "class-means", "epsilon": 8.0, "delta": 1e-3, "threads": 1}
    return Settings(**common | others).resolved()


class TestImages:
    def test_a_run_on_them(self, folder, tmp_path):
        chosen = settings(image_folder=folder, image_size=8, features="pixels")
        directory = RunDirectory(tmp_path / "run")
        summary = trainer.run(chosen, directory)
        assert (summary["dataset"], summary["private"]) == ("image-folder", True)
        assert summary["heldout_accuracy"] == 1.0
        assert json.loads(directory.privacy.read_text())["expected_batch_size"] == 64

    def test_networks_read_them_too(self, folder):
        chosen = settings(image_folder=folder, image_size=8, model="model1", method="dpsgd")
        assert trainer.load_data(chosen).input_shape == (3, 8, 8)
        assert target_from_settings(chosen, claim=claim_from_settings(chosen, 1000)).claim.sample_rate == 0.256

    def test_their_facts(self, folder):
        info = records_info(settings(image_folder=folder, image_size=8, features="pixels"))
        assert (info.name, info.shape, info.classes) == ("image-folder", (3, 8, 8), 2)
        assert (info.train_samples, info.test_samples) == (64, 16)

    def test_a_file_that_was_changed_is_read_again(self, folder):
        chosen = settings(image_folder=folder, image_size=8, features="pixels")
        before = load_records(chosen)
        assert load_records(chosen) is before
        os.utime(f"{folder}/dark/3.png", ns=(1, 2**62))
        assert load_records(chosen) is not before

    def test_faults_name_the_file(self, folder):
        with pytest.raises(DataError, match="give --image-size"):
            load_records(settings(image_folder=folder, features="pixels"))


class TestTexts:
    @pytest.mark.parametrize("method", ["class-means", "least-squares", "dpsgd"])
    def test_a_run_on_them(self, texts, tmp_path, method):
        chosen = settings(features="hashed-words", method=method, epochs=5, batch_size=40, learning_rate=4.0, **texts)
        summary = trainer.run(chosen, RunDirectory(tmp_path / "run"))
        assert summary["dataset"] == "csv"
        assert summary["heldout_accuracy"] > 0.9

    def test_a_finished_run_knows_where_they_were(self, texts, tmp_path):
        chosen = settings(features="hashed-words", **texts)
        directory = RunDirectory(tmp_path / "run")
        trainer.run(chosen, directory)
        assert directory.settings() == chosen
        assert Settings.from_dict(directory.settings().to_dict()).resolved() == chosen

    def test_networks_of_images_do_not_read_them(self, texts):
        with pytest.raises(SettingsError, match="csv has texts, which model1 does not read: use model linear"):
            load_images(settings(model="model1", method="dpsgd", **texts))

    def test_nor_do_features_of_images(self, texts):
        with pytest.raises(FeatureError, match="expected images"):
            trainer.load_data(settings(features="pixels", **texts))

    def test_nor_have_images_words(self):
        with pytest.raises(FeatureError, match="features of texts"):
            trainer.load_data(settings(features="hashed-words"))

    def test_they_have_no_size(self, texts):
        with pytest.raises(SettingsError, match="leave out image_size"):
            load_records(settings(features="hashed-words", image_size=8, **texts))


class TestCatalog:
    def test_by_name(self):
        chosen = settings(features="pixels", image_size=16)
        assert isinstance(load_records(chosen), ImageDataset)
        assert load_records(chosen).input_shape == (1, 16, 16)
        assert records_info(chosen).name == "digits"

    def test_kinds(self, texts):
        assert isinstance(load_records(settings(features="hashed-words", **texts)), TextDataset)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image_folder": "a", "csv": "b"}, "give one of data_path, image_folder, csv"),
        ({"csv": "b", "data_path": "c"}, "give one of data_path"),
        ({"csv": "b", "dataset": "mnist"}, "give dataset or csv, not both: got mnist and b"),
        ({"dataset": "csv"}, "the data set csv is your own: say where it is"),
    ],
)
def test_two_sources_are_refused(given, message):
    with pytest.raises(SettingsError, match=message):
        Settings(**given)
