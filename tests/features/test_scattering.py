"""Scattering here is kymatio's, to rounding, in kymatio's order."""

import pytest
import torch

from spectral_dp.features import FeatureError, Scattering
from spectral_dp.features.kymatio_filters import kymatio_transform

SETTINGS = [(2, 8, 2, (32, 32)), (2, 8, 2, (28, 28)), (3, 4, 2, (32, 32)), (2, 6, 1, (28, 20)), (1, 8, 2, (8, 8))]


@pytest.mark.parametrize(("scales", "angles", "order", "size"), SETTINGS)
def test_equals_kymatio(scales, angles, order, size):
    pytest.importorskip("kymatio")
    scattering = Scattering((0.0, 0.0), (1.0, 1.0), scales, angles, order)
    images = torch.rand(3, 2, *size)
    theirs = kymatio_transform(scales, angles, order, size)(images).flatten(1, 2)
    ours = scattering.module((2, *size))(images)
    assert tuple(ours.shape[1:]) == scattering.output_shape((2, *size))
    assert (ours - theirs).abs().max() < 1e-6 * theirs.abs().max() + 1e-6


def test_shapes_are_the_papers():
    assert Scattering((0.1,), (0.3,)).output_shape((1, 28, 28)) == (81, 7, 7)
    assert Scattering((0.1,) * 3, (0.3,) * 3).output_shape((3, 32, 32)) == (243, 8, 8)


def test_bytes_and_numbers_are_the_same_images():
    pytest.importorskip("kymatio")
    module = Scattering((0.4,), (0.3,)).module((1, 8, 8))
    pixels = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    assert torch.allclose(module(pixels), module(pixels.float() / 255), atol=1e-6)


def test_public_constants_standardise_the_images():
    pytest.importorskip("kymatio")
    shape, images = (1, 8, 8), torch.rand(2, 1, 8, 8)
    plain, standardised = Scattering((0.0,), (1.0,)).module(shape), Scattering((0.4,), (0.3,)).module(shape)
    assert torch.allclose(standardised(images), plain((images - 0.4) / 0.3), atol=1e-5)


def test_records_are_independent_and_the_state_is_empty():
    """Catches statistics of the batch, which would make features of a record depend on others."""
    pytest.importorskip("kymatio")
    module = Scattering((0.4,), (0.3,)).module((1, 8, 8))
    images = torch.rand(5, 1, 8, 8)
    assert torch.allclose(module(images)[2], module(images[2:3])[0], atol=1e-6)
    assert module.state_dict() == {}
    assert not list(module.parameters())


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 30, 30), "multiples of 4 .*got 30 x 30.*--image-size 32"),
        ((3, 8, 8), "1 channels"),
        ((1, 2, 2), "at least 8, got 2 x 2.*--image-size 8"),
        ((1, 4, 4), "at least 8, got 4 x 4.*--image-size 8"),  # padding mirrors four pixels, and there is no fifth
        ((1, 4, 32), "at least 8, got 4 x 32"),
    ],
)
def test_images_that_do_not_fit_are_refused(shape, message):
    with pytest.raises(FeatureError, match=message):
        Scattering((0.4,), (0.3,)).output_shape(shape)


@pytest.mark.parametrize("options", [{"order": 3}, {"scales": 0}, {"angles": 0}, {"std": (0.0,)}, {"mean": (0.1, 0.2)}])
def test_settings_that_do_not_work_are_refused(options):
    with pytest.raises(FeatureError):
        Scattering(**({"mean": (0.4,), "std": (0.3,)} | options))


def test_the_smallest_images_that_are_accepted_have_features():
    """Catches an output_shape for images that the module cannot pad."""
    pytest.importorskip("kymatio")
    for scales in (1, 2, 3):
        scattering, shape = Scattering((0.4,), (0.3,), scales), (1, 2 * 2**scales, 2 * 2**scales)
        assert tuple(scattering.module(shape)(torch.rand(2, *shape)).shape[1:]) == scattering.output_shape(shape)


def test_whole_numbers_that_are_no_bytes_are_refused():
    """Catches pixels up to 255 that are taken for numbers from 0 to 1."""
    pytest.importorskip("kymatio")
    with pytest.raises(FeatureError, match=r"got torch\.int64"):
        Scattering((0.4,), (0.3,)).module((1, 8, 8))(torch.randint(0, 256, (2, 1, 8, 8)))


def test_a_wrong_batch_is_refused_without_the_number_of_records():
    pytest.importorskip("kymatio")
    with pytest.raises(FeatureError, match=r"\(B, 1, 8, 8\)"):
        Scattering((0.4,), (0.3,)).module((1, 8, 8))(torch.rand(17, 1, 12, 12))
