"""``spectral-dp features``: into the cache once, and plain errors."""

import json

import pytest
from PIL import Image
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


@pytest.fixture
def photos(tmp_path):
    for number in range(10):
        folder = tmp_path / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + number, 24), (20 * number, 90, 30)).save(folder / f"{number}.png")
    return tmp_path / "photos"


@pytest.fixture
def reviews(tmp_path):
    lines = ["review,stars", *(f"the film was {'good' if n % 2 else 'bad'} {n},{n % 2}" for n in range(10))]
    (tmp_path / "reviews.csv").write_text("\n".join(lines))
    return tmp_path / "reviews.csv"


def trained(out, *arguments):
    given = ["--model", "linear", "--method", "class-means", "--epsilon", 8, "--delta", 0.01, "--threads", 1]
    result = CliRunner().invoke(app, ["train", *map(str, [*arguments, *given]), "--quiet", "--out", str(out)])
    assert result.exit_code == 0, result.stderr


def test_own_images_are_cached_as_training_reads_them(photos, weights, tmp_path):
    given = ["--image-folder", photos, "--image-size", 16]
    result = run(*given, "--backbone", "mobilenet-v2", "--weights", weights, "--jobs", 1, "--json")
    assert result.exit_code == 0, result.stderr
    assert [each["shape"] for each in json.loads(result.stdout)] == [[8, 1280], [2, 1280]]
    kept = sorted((tmp_path / "features").iterdir())
    trained(
        *(tmp_path / "run", *given, "--features", "mobilenet-v2", "--feature-option", f"weights={weights}"),
        *("--feature-option", "image_size=16"),
    )
    assert sorted((tmp_path / "features").iterdir()) == kept


def test_own_texts_are_cached_as_training_reads_them(reviews, tmp_path):
    given = ["--csv", reviews, "--text-column", "review", "--label-column", "stars", "--features", "hashed-words"]
    result = run(*given, "--jobs", 1)
    assert result.exit_code == 0, result.stderr
    assert "csv train plain: 8 x " in result.stdout
    kept = sorted((tmp_path / "features").iterdir())
    trained(tmp_path / "run", *given)
    assert sorted((tmp_path / "features").iterdir()) == kept


def test_what_is_wrong_with_own_records_is_told(photos, reviews, tmp_path):
    sized = run("--image-folder", photos, "--features", "pixels")
    assert sized.exit_code == 2
    assert "give --image-size" in sized.stderr
    (photos / "cat" / "broken.png").write_bytes(b"nothing")
    broken = run("--image-folder", photos, "--features", "pixels", "--image-size", 8)
    assert f"{photos / 'cat' / 'broken.png'} cannot be read as an image" in broken.stderr
    with reviews.open("a") as file:
        file.write("\nno comma")
    ragged = run("--csv", reviews, "--text-column", "review", "--label-column", "stars", "--features", "hashed-words")
    assert f"{reviews}, line 12: 1 fields" in ragged.stderr
    assert not (tmp_path / "features").exists()


def test_texts_have_no_mirror_image(reviews):
    given = ["--csv", reviews, "--text-column", "review", "--label-column", "stars", "--features", "hashed-words"]
    result = run(*given, "--mirrored", "--jobs", 1)
    assert result.exit_code == 2
    assert "only images (B, C, H, W) can be mirrored" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scattering"], "DATASET, --image-folder DIR or --csv FILE"),
        (["digits", "--image-folder", "photos", "--scattering"], "digits and photos both say which records"),
        (
            ["--csv", "texts.csv", "--image-folder", "photos", "--scattering"],
            "give one of data_path, image_folder, csv",
        ),
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
