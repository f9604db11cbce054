"""``spectral-dp features``: into the cache once, and plain errors."""

import json

import pytest
from tests.support.pretrained import weights_content
from typer.testing import CliRunner

from spectral_dp.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["features", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path))


def test_computes_once_and_keeps(tmp_path):
    pytest.importorskip("kymatio")
    result = run("digits", "--scattering", "--mirrored", "--jobs", 1, "--json")
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert [(m["split"], m["view"], m["shape"]) for m in made] == [
        ("train", "plain", [1437, 81, 2, 2]),
        ("test", "plain", [360, 81, 2, 2]),
        ("train", "mirrored", [1437, 81, 2, 2]),
    ]
    again = run("digits", "--scattering", "--jobs", 1, "--verify")
    assert again.exit_code == 0
    assert "digits test plain: 360 x 81 x 2 x 2" in again.stdout


def test_features_by_name_have_options():
    pytest.importorskip("kymatio")
    result = run("digits", "--features", "scattering", "--feature-option", "scales=1", "--jobs", 1, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)[0]["shape"] == [1437, 9, 4, 4]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "mobilenet.safetensors"
    file.write_bytes(weights_content("mobilenet-v2"))
    return file


@pytest.mark.parametrize(("maps", "shape"), [([], [1437, 1280]), (["--maps"], [1437, 1280, 1, 1])])
def test_a_backbone_resizes_images_itself(weights, maps, shape):
    given = ["--weights", weights, "--image-size", 16, *maps, "--jobs", 1, "--json"]
    result = run("digits", "--backbone", "mobilenet-v2", *given)
    assert result.exit_code == 0, result.stderr
    made = json.loads(result.stdout)
    assert made[0]["shape"] == shape
    assert "digits-8x8-train-mobilenet-v2" in made[0]["path"]  # of the data set as published
    again = run("digits", "--features", "mobilenet-v2", *given)
    assert [each["path"] for each in json.loads(again.stdout)] == [each["path"] for each in made]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits"], "say which features"),
        (["digits", "--backbone", "mobilenet-v2"], "spectral-dp weights get mobilenet-v2"),
        (["digits", "--backbone", "mobilenet-v2", "--weights", "absent.pth"], "cannot read the weights absent.pth"),
        (["digits", "--backbone", "vgg"], "--backbone, --weights and --maps are for one of resnet18"),
        (["digits", "--scattering", "--maps"], "--backbone, --weights and --maps are for one of resnet18"),
        (["digits", "--scattering", "--backbone", "resnet18"], "give one of them"),
        (["digits", "--scattering", "--features", "scattering"], "give one of them"),
        (["digits", "--features", "wavelets"], "unknown features 'wavelets': choose one of scattering"),
        (["digits", "--scattering", "--feature-option", "depth=3"], "no option depth: choose from scales, angles"),
        (["digits", "--scattering", "--feature-option", "scales"], "NAME=VALUE"),
        (["digits", "--scattering", "--image-size", 10], "multiples of 4 and at least 8, got 10 x 10"),
        (["nothing", "--scattering"], "nothing"),
        (["mnist", "--scattering"], "spectral-dp data get mnist"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
