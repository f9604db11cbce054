"""``spectral-dp train``: flags and files, what it prints, and what it refuses."""

import json
import shutil

import pytest
from PIL import Image
from tests.support.pretrained import small_files
from typer.testing import CliRunner

from spectral_dp.cli import app
from spectral_dp.experiments.run_directory import RunDirectory

NETWORK = """
from torch import nn
def net(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))
"""
FLAGS = (
    "--model train_test_network:net --train-size 100 --batch-size 20 --epochs 2 --noise-multiplier 1 --accountant rdp"
)


@pytest.fixture(autouse=True)
def _quick(tmp_path, monkeypatch):
    (tmp_path / "train_test_network.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spectral_dp.experiments.trainer._tensorboard", lambda directory: None)
    monkeypatch.setattr("spectral_dp.experiments.trainer.draw_run", lambda directory: None)


def run(*arguments):
    return CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "200"})


def test_a_run_from_flags():
    result = run(*FLAGS.split(), "--out", "run")
    assert result.exit_code == 0, result.output
    assert "held-out accuracy" in result.stdout
    assert "epsilon spent" in result.stdout
    assert RunDirectory("run").settings().train_size == 100


def test_json_is_the_summary_and_nothing_else():
    result = run(*FLAGS.split(), "--out", "run", "--json")
    summary = json.loads(result.stdout)
    assert summary["directory"] == "run"
    assert summary["steps"] == 10


def test_the_default_directory_tells_what_it_is(tmp_path):
    assert run(*FLAGS.split()).exit_code == 0
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name.startswith("digits-train_test_network.net-spectral-")


def test_flags_win_over_the_file_and_a_runs_own_file_repeats_it(tmp_path):
    (tmp_path / "run.toml").write_text(
        'model = "train_test_network:net"\ntrain-size = 100\nbatch_size = 20\nepochs = 7\nnoise_multiplier = 1\n'
        'accountant = "rdp"\n[layer_ratios]\n'
    )
    assert run("--config", "run.toml", "--epochs", "1", "--out", "a").exit_code == 0
    assert RunDirectory("a").settings().epochs == 1
    assert run("--config", "a/config.json", "--out", "b").exit_code == 0
    assert RunDirectory("b").settings() == RunDirectory("a").settings()


def test_resume_needs_no_other_flags():
    assert run(*FLAGS.split(), "--out", "run").exit_code == 0
    RunDirectory("run").summary_file.unlink()
    result = run("--out", "run", "--resume")
    assert result.exit_code == 0, result.output
    assert RunDirectory("run").is_finished
    refused = run("--out", "run", "--resume", "--epochs", "9")
    assert refused.exit_code == 2
    assert "epochs: 2 there, 9 now" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dataset imagenet", "choose one of digits"),
        ("--model resnet", "choose one of model1, lenet5"),
        ("--method sgd", "'spectral', 'dpsgd', 'opacus', 'class-means', 'least-squares', 'nonprivate'"),
        ("--epochs 0", "epochs must be positive"),
        ("--epsilon 1 --noise-multiplier 1", "not both"),
        ("--layer-ratio fc1", "NAME=RATIO"),
        ("--config nothing.toml", "cannot read the configuration nothing.toml"),
        ("--resume", "--resume needs --out"),
        ("--resume --out typo", "typo holds no run to go on with"),
        ("--optimizer adam --momentum 0.5", "momentum 0.5 is SGD's"),
        ("--noise-allocation optimal", "needs clipping per_layer"),
        ("--seed 99999999999999", "seed must be from 0 to 2^31 - 1"),
        ("--model model1 --block-size 0 --dense-layer fc1", "leave out dense_layers"),
        ("--dataset mnist --data-path nowhere", "nowhere"),
        ("--model lenet5", "at least 12 x 12 pixels"),
        ("--delta 1e-18", "delta"),
    ],
)
def test_refusals_are_one_line_with_the_fix(arguments, message, tmp_path):
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("runs/*/summary.json"))


def test_flags_that_may_be_repeated():
    bounds = ["--clipping", "per_layer", "--layer-max-grad-norm", "0.3"]
    result = run(*FLAGS.split(), *bounds, "--layer-ratio", "1=0", "--layer-ratio", "0=0", "--out", "run")
    assert result.exit_code == 0, result.output
    settings = RunDirectory("run").settings()
    assert settings.layer_max_grad_norms == [0.3]
    assert settings.layer_ratios == {"1": 0.0, "0": 0.0}


def test_old_names_in_a_file_or_a_run_directory_are_refused(tmp_path):
    assert run(*FLAGS.split(), "--out", "run").exit_code == 0
    config = RunDirectory("run").config
    config.write_text(config.read_text().replace('"ema_decay"', '"average"'))
    for arguments in (["--out", "run", "--resume"], ["--config", "run/config.json", "--out", "other"]):
        refused = run(*arguments)
        assert refused.exit_code == 2
        assert refused.stderr == "error: average is now ema_decay: rename it in run/config.json\n"


def test_settings_without_effect_are_named():
    result = run(*FLAGS.split(), "--method", "dpsgd", "--linear-ratio", "0.5", "--out", "run")
    assert result.exit_code == 0
    assert "method dpsgd makes no use of linear_ratio" in result.stderr


def test_a_seeded_run_says_so():
    assert "NOT private" in " ".join(run(*FLAGS.split(), "--reproducible", "--out", "run").stdout.split())


def test_a_full_disk_is_exit_code_1(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spectral_dp.experiments.trainer.write_statement", full)
    result = run(*FLAGS.split(), "--out", "run")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr


def test_ctrl_c_says_how_to_go_on(monkeypatch):
    from spectral_dp.experiments import trainer

    def stopped(*_, **__):
        raise trainer.Interrupted("stopped at step 3 of 10")

    monkeypatch.setattr(trainer, "run", stopped)
    result = run(*FLAGS.split(), "--out", "run")
    assert result.exit_code == 130
    assert "stopped at step 3 of 10" in result.stderr
    assert "spectral-dp train --out run --resume" in result.stderr


def _own_records(folder):
    """Images in two folders, texts in a file, and weights of one small network and of another."""
    for number in range(10):
        place = folder / "photos" / ("cat" if number % 2 else "dog")
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (20 * number, 90, 30)).save(place / f"{number}.png")
    lines = ["text,label", *(f"the film was {'good' if n % 2 else 'bad'},{n % 2}" for n in range(10))]
    (folder / "texts.csv").write_text("\n".join(lines) + "\n")


TEXTS = "--csv texts.csv --features hashed-words --model linear --method class-means"
IMAGES = "--image-folder photos --features pixels --model linear --method class-means"


@pytest.mark.parametrize(
    ("flags", "spoil", "message"),
    [
        (TEXTS, ("texts.csv", "three fields,1,2\n"), "texts.csv, line 12: 3 fields"),
        (TEXTS, ("texts.csv", "123 !?,1\n"), "texts.csv, line 12: the text '123 !?' has no letter"),
        (IMAGES, ("photos/cat/broken.png", "no image"), "photos/cat/broken.png cannot be read as an image"),
        (IMAGES, ("photos/cat", None), "photos has only the folder dog"),
        (
            "--image-folder photos --model wrn-28-10 --weights resnext29.safetensors --tune head",
            ("ignored.txt", ""),
            "resnext29.safetensors does not hold weights of wrn-28-10",
        ),
    ],
    ids=["ragged row", "no letters", "no image", "one class", "another architecture"],
)
def test_bad_records_and_weights_are_named_and_nothing_is_lost(flags, spoil, message, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))
    _own_records(tmp_path)
    small_files(tmp_path, monkeypatch)
    common = ["--epsilon", "8", "--delta", "0.01", "--threads", "1"]
    before = run(*IMAGES.split(), *common, "--out", "before")
    assert before.exit_code == 0, before.stderr
    kept = {path: path.stat().st_mtime_ns for place in ("before", "cache") for path in (tmp_path / place).rglob("*")}
    name, content = spoil
    if content is None:
        shutil.rmtree(tmp_path / name)
    else:
        with (tmp_path / name).open("a") as file:
            file.write(content)
    result = run(*flags.split(), *common, "--out", "run")
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not RunDirectory("run").exists
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
