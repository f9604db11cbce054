"""Images made upright: slants and places are gone, each image by itself, for every front end."""

import pickle

import pytest
import torch
from torch.nn import functional as F

from spectral_dp.features import FeatureError, Patches, Pixels, Upright, extract_features
from spectral_dp.features.upright import made_upright
from spectral_dp.priors import generate_images

STROKES = generate_images("strokes", 12, (1, 28, 28), seed=3)
PIXELS = Pixels((0.0,), (1.0,))


def bar(slant, x=0.0, y=0.0, size=28):
    """A soft bar of a slant, centred at (x, y) from the middle of the image."""
    rows, columns = torch.meshgrid(*[torch.arange(size) + 0.5 - size / 2] * 2, indexing="ij")
    across = columns - x - slant * (rows - y)
    return (torch.exp(-(across**2) / 4) * torch.sigmoid(16 - 2 * (rows - y).abs()))[None, None]


@pytest.mark.parametrize("slant", [-0.7, -0.3, 0.0, 0.4, 0.8])
@pytest.mark.parametrize("place", [(0, 0), (3, -2), (-2.5, 1.5)])
def test_slant_and_place_are_gone(slant, place):
    assert (made_upright(bar(slant, *place)) - bar(0.0)).abs().max() < 0.12  # between pixels there is a little blur
    if slant or place != (0, 0):
        assert (bar(slant, *place) - bar(0.0)).abs().max() > 0.3


def test_it_is_the_formula():
    """Against a loop over pixels in float64."""
    image = STROKES[0, 0].double() / 255
    size = len(image)
    at = [i + 0.5 - size / 2 for i in range(size)]
    total = image.sum()
    cx = sum(image[i, j] * at[j] for i in range(size) for j in range(size)) / total
    cy = sum(image[i, j] * at[i] for i in range(size) for j in range(size)) / total
    xy = sum(image[i, j] * (at[j] - cx) * (at[i] - cy) for i in range(size) for j in range(size))
    yy = sum(image[i, j] * (at[i] - cy) ** 2 for i in range(size) for j in range(size))
    padded = F.pad(image, (size,) * 4)
    found = made_upright(STROKES[:1])[0, 0]
    for i, j in [(14, 14), (9, 12), (20, 17), (3, 25)]:
        row, column = at[i] + cy + size / 2 - 0.5 + size, at[j] + xy / yy * at[i] + cx + size / 2 - 0.5 + size
        top, left = int(row), int(column)
        a, b = row - top, column - left
        (p, q), (r, s) = padded[top : top + 2, left : left + 2]
        expected = (1 - a) * ((1 - b) * p + b * q) + a * ((1 - b) * r + b * s)
        assert float(found[i, j]) == pytest.approx(float(expected), abs=1e-4)


def test_no_image_depends_on_another():
    """To the last bit, or one record could move the features of others."""
    together = made_upright(STROKES)
    for i, image in enumerate(STROKES):
        assert torch.equal(made_upright(image[None]), together[i : i + 1])
    hostile = torch.cat([torch.full((1, 1, 28, 28), float("nan")), STROKES.float() / 255])
    assert torch.equal(made_upright(hostile)[1:], together)


@pytest.mark.parametrize("value", [0, 255])
def test_images_of_one_colour(value):
    image = torch.full((1, 3, 16, 16), value, dtype=torch.uint8)
    assert torch.allclose(made_upright(image), image.float() / 255, atol=1e-3)


def test_a_figure_of_one_row_has_no_slant():
    image = torch.zeros(1, 1, 16, 16)
    image[..., 7, 3:12] = 1.0
    assert torch.isfinite(made_upright(image)).all()
    assert made_upright(image).sum() == pytest.approx(float(image.sum()), rel=1e-3)


def test_it_leans_back_by_45_degrees_at_most():
    assert made_upright(bar(2.0)).sum() == pytest.approx(float(bar(2.0).sum()), rel=0.3)
    assert (made_upright(bar(2.0)) - bar(0.0)).abs().max() > 0.3


def test_bytes_and_numbers_are_alike():
    assert torch.allclose(made_upright(STROKES), made_upright(STROKES.float() / 255))


def test_no_images():
    assert made_upright(STROKES[:0]).shape == (0, 1, 28, 28)


def test_a_front_end_reads_what_is_upright():
    extractor = Upright(PIXELS)
    assert extractor.output_shape((1, 28, 28)) == (784,)
    assert torch.allclose(
        extractor.module((1, 28, 28))(STROKES), made_upright(STROKES).flatten(1), atol=0.5 / 255 + 1e-6
    )


def test_its_cache_is_another(tmp_path):
    plain = extract_features(STROKES, PIXELS, tmp_path, title="strokes")
    straight = extract_features(STROKES, Upright(PIXELS), tmp_path, title="strokes")
    assert plain.path != straight.path
    assert straight.path.name.startswith("strokes-upright-pixels")
    assert torch.allclose(straight[:].float(), made_upright(STROKES).flatten(1), atol=3e-3)
    assert pickle.loads(pickle.dumps(Upright(PIXELS))).settings == Upright(PIXELS).settings
    assert Upright(PIXELS).settings != Upright(Pixels((0.1,), (1.0,))).settings


def test_it_is_as_public_as_the_front_end():
    assert Upright(Patches()).is_public
    assert not Upright(Patches(prior="spectral_dp.experiments.training_images:digits")).is_public


def test_other_numbers_count_as_the_nearest_and_whole_ones_are_refused():
    wild = STROKES[:3].float() / 255
    wild[0, 0, 3, 3], wild[1, 0, 3, 3], wild[2, 0, 3, 3] = float("nan"), 1e30, -5.0
    tame = STROKES[:3].float() / 255
    tame[0, 0, 3, 3], tame[1, 0, 3, 3], tame[2, 0, 3, 3] = 0.0, 1.0, 0.0
    assert torch.equal(made_upright(wild), made_upright(tame))
    with pytest.raises(FeatureError, match=r"got torch\.int64"):
        made_upright(STROKES.long())


def test_texts_are_refused():
    with pytest.raises(FeatureError, match="only images"):
        Upright(PIXELS).output_shape((4096,))
