"""A pretrained network as a front end: the features of the network itself, resized and normalised inside."""

import pickle
import subprocess
import sys

import pytest
import torch
from tests.support.pretrained import lively, weights_content
from torch.nn import functional as F

from spectral_dp.features import Backbone, FeatureError, ImageFacts, build_extractor, extract_features
from spectral_dp.pretrained import NAMES, WeightsError, find_architecture, find_weights
from spectral_dp.pretrained.networks.minilm import MiniLM
from spectral_dp.pretrained.networks.wide_resnet import WideResNet

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "movie", "##s", "!"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("weights") / "mobilenet.safetensors"
    file.write_bytes(weights_content("mobilenet-v2"))
    return file


@pytest.fixture(scope="module")
def weights(path):
    return find_weights("mobilenet-v2", path)


def images(samples=3, channels=3):
    return torch.randint(0, 256, (samples, channels, 8, 8), dtype=torch.uint8)


def by_hand(weights, pixels, *, maps=False, size=32, mode="bilinear"):
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (weights.mean, weights.std))
    resized = F.interpolate(pixels.float() / 255, (size, size), mode=mode, antialias=True)
    network = weights.network()
    with torch.no_grad():
        return network.maps((resized - mean) / std) if maps else network.pooled((resized - mean) / std)


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_features_are_those_of_the_network(weights, maps, interpolation):
    extractor = Backbone(weights, 32, maps, interpolation)
    pixels = images()
    with torch.no_grad():
        found = extractor.module((3, 8, 8))(pixels)
    expected = by_hand(weights, pixels, maps=maps, mode=interpolation)
    assert tuple(found.shape[1:]) == extractor.output_shape((3, 8, 8))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_bytes_and_numbers_are_the_same_images(weights):
    module, pixels = Backbone(weights, 32).module((3, 8, 8)), images()
    with torch.no_grad():
        assert torch.allclose(module(pixels), module(pixels.float() / 255), atol=1e-5)


def test_grey_images_are_repeated(weights):
    grey = images(channels=1)
    extractor = Backbone(weights, 32)
    with torch.no_grad():
        found = extractor.module((1, 8, 8))(grey)
        expected = extractor.module((3, 8, 8))(grey.expand(-1, 3, -1, -1))
    assert torch.allclose(found, expected, atol=1e-5)


def test_records_are_independent_and_nothing_is_trained(weights):
    """Catches statistics of the batch, which would make features of a record depend on others."""
    module, pixels = Backbone(weights, 32).module((3, 8, 8)), images(5)
    assert not any(part.training for part in module.modules())
    with torch.no_grad():
        assert torch.allclose(module(pixels)[2], module(pixels[2:3])[0], atol=1e-5)


def test_settings_tell_caches_apart(weights):
    different = [
        Backbone(weights, 32),
        Backbone(weights, 64),
        Backbone(weights),
        Backbone(weights, 32, maps=True),
        Backbone(weights, 32, interpolation="bicubic"),
    ]
    assert len({str(extractor.settings) for extractor in different}) == len(different)
    assert different[0].settings["weights"] == weights.sha256
    assert "path" not in str(different[0].settings)  # the same weights elsewhere are the same features
    assert different[2].settings["image_size"] == 224


@pytest.mark.parametrize(
    ("name", "size", "shape"),
    [("resnet18", 128, (512, 4, 4)), ("efficientnet-lite0", 128, (1280, 4, 4)), ("wrn-28-10", 32, (640, 8, 8))],
)
def test_shapes_are_known_before_weights_are_read(weights, name, size, shape):
    from dataclasses import replace

    extractor = Backbone(replace(weights, name=name), size, maps=True)
    assert extractor.output_shape((3, 32, 32)) == shape
    assert Backbone(extractor.weights, size).output_shape((3, 32, 32)) == shape[:1]


def test_shapes_are_those_of_the_network_that_has_the_name_now(weights, monkeypatch):
    from dataclasses import replace
    from functools import partial

    from spectral_dp.pretrained import architectures

    named = Backbone(replace(weights, name="wrn-28-10"), 32, maps=True)
    monkeypatch.setattr(
        architectures,
        "ARCHITECTURES",
        (replace(find_architecture("wrn-28-10"), factory=partial(WideResNet, depth=10, factor=1)),),
    )
    assert named.output_shape((3, 32, 32)) == (64, 8, 8)
    monkeypatch.undo()
    assert named.output_shape((3, 32, 32)) == (640, 8, 8)


def test_cached_by_several_processes(weights, tmp_path):
    extractor = pickle.loads(pickle.dumps(Backbone(weights, 32)))
    pixels = images(4)
    cache = extract_features(pixels, extractor, tmp_path, title="few", jobs=1)
    assert torch.allclose(cache[:].float(), by_hand(weights, pixels), rtol=2e-3, atol=1e-3)
    mirrored = extract_features(pixels, extractor, tmp_path, title="few", view="mirrored")
    assert torch.allclose(mirrored[:].float(), by_hand(weights, pixels.flip(-1)), rtol=2e-3, atol=1e-3)


def test_every_network_is_registered():
    for name in NAMES:
        with pytest.raises(WeightsError, match=r"cannot read the weights .*absent"):
            build_extractor(name, ImageFacts((3, 8, 8), (0.5,) * 3, (0.2,) * 3), {"weights": "absent"})


def test_by_name_with_options(path, weights):
    facts = ImageFacts((3, 8, 8), (0.5,) * 3, (0.2,) * 3)
    extractor = build_extractor("mobilenet-v2", facts, {"weights": str(path), "image_size": 32, "maps": 1})
    assert extractor == Backbone(weights, 32, maps=True)
    assert "taken to be public" in extractor.assumption
    with pytest.raises(FeatureError, match="no option length: choose from weights, image_size, maps"):
        build_extractor("mobilenet-v2", facts, {"length": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interpolation": "nearest"}, "choose one of bilinear, bicubic"),
        ({"image_size": 0}, "at least 1, got 0"),
        ({"image_size": "large"}, "at least 1, got 'large'"),
        ({"maps": "false"}, "maps is 1 for the last maps, or 0 for their average, got 'false'"),
        ({"length": 1}, "at least 2, got 1"),
    ],
)
def test_settings_that_there_are_not(weights, options, message):
    with pytest.raises(FeatureError, match=message):
        Backbone(weights, **options)


@pytest.mark.parametrize("shape", [(2, 8, 8), (8, 8), (7,)])
def test_records_that_are_no_images(weights, shape):
    with pytest.raises(FeatureError, match="expected images of 1 or 3 channels"):
        Backbone(weights).output_shape(shape)


@pytest.fixture
def text_weights(tmp_path, monkeypatch):
    """A small encoder in the place of MiniLM, with a small vocabulary beside its weights."""
    from dataclasses import replace
    from functools import partial

    from safetensors.torch import save_file

    from spectral_dp.pretrained import architectures

    small = partial(MiniLM, layers=1, width=8, heads=2, hidden=16, vocabulary=len(VOCABULARY), positions=16)
    replaced = replace(find_architecture("minilm-l6"), factory=small)
    monkeypatch.setattr(architectures, "ARCHITECTURES", (replaced,))
    save_file(lively(small()).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "vocab.txt").write_text("".join(f"{piece}\n" for piece in VOCABULARY))
    return find_weights("minilm-l6", tmp_path / "model.safetensors")


def as_bytes(*texts, length=24):
    return torch.stack([torch.tensor([*t.encode()[:length].ljust(length, b"\0")], dtype=torch.uint8) for t in texts])


def test_texts_are_bytes_or_word_pieces(text_weights):
    extractor = Backbone(find_weights("minilm-l6", text_weights.path), length=8)
    assert extractor.output_shape((24,)) == (8,)
    module = extractor.module((24,))
    texts = ["Good movies!", "bad movie"]
    pieces = text_weights.tokenizer().encode(texts, length=8)
    with torch.no_grad():
        found = module(as_bytes(*texts))
        assert torch.allclose(found, module(pieces), atol=1e-6)
        assert torch.allclose(found, text_weights.network().pooled(pieces), atol=1e-6)
        assert torch.allclose(module(as_bytes(texts[1]))[0], found[1], atol=1e-5)


def test_a_text_that_ends_within_a_character(text_weights):
    cut = as_bytes("good é", length=6)
    with torch.no_grad():
        module = Backbone(find_weights("minilm-l6", text_weights.path)).module((6,))
        assert torch.allclose(module(cut), module(as_bytes("good", length=6)), atol=1e-6)
        assert bool(module(torch.zeros(1, 6, dtype=torch.uint8)).isfinite().all())


def test_another_vocabulary_is_another_cache(text_weights):
    before = dict(Backbone(text_weights).settings)
    (text_weights.path.parent / "vocab.txt").write_text("".join(f"{piece}\n" for piece in [*VOCABULARY[:-1], "?"]))
    assert Backbone(text_weights).settings != before


def test_options_of_the_network_tell_caches_apart(weights):
    """The same numbers make another network with its strides elsewhere."""
    from dataclasses import replace

    assert Backbone(replace(weights, options={"stride_first": True})).settings != Backbone(weights).settings


def test_texts_have_no_maps(text_weights):
    with pytest.raises(FeatureError, match="minilm-l6 reads texts, which have no maps and no image size"):
        Backbone(text_weights, maps=True)
    with pytest.raises(FeatureError, match=r"minilm-l6 reads texts \(L,\), got records of shape \(3, 8, 8\)"):
        Backbone(text_weights).output_shape((3, 8, 8))


def test_large_images_are_computed_a_few_at_a_time(weights):
    """Catches a fixed number of rows: their maps leave the processor's cache, which costs a third of the time."""
    rows = [Backbone(weights, side).module((3, 8, 8)).rows_at_once for side in (32, 128, 224, 1024)]
    assert rows == sorted(rows, reverse=True)
    assert rows[2:] == [2, 1]


def test_shapes_are_told_without_the_compiler_of_torch():
    """Catches BatchNorm on the device meta: it loads torch's compiler, a second at the start of every run."""
    code = (
        "import sys; from spectral_dp.features.backbone import _map_shape, find_architecture as find; "
        "assert _map_shape(find('efficientnet-lite0'), 224) == (1280, 7, 7); assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
