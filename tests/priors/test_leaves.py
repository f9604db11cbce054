"""Dead leaves: one formula for three shapes, radii by a power law, and edges where leaves cover each other."""

import math

import pytest
import torch

from spectral_dp.priors import DeadLeaves, WhiteNoise
from spectral_dp.priors.leaves import _line

SHAPE = (3, 32, 32)


def draw(count=64, shape=SHAPE, seed=0, **settings):
    return DeadLeaves(**settings).draw(count, shape, torch.Generator().manual_seed(seed))


def leaves_of(count, shape=SHAPE, **settings):
    palette = torch.full((count, shape[0]), 0.5)
    return DeadLeaves(**settings)._leaves(palette, shape, torch.Generator().manual_seed(0))


def test_pixels_are_from_zero_to_one():
    images = draw(texture=1.0, shading=1.0)
    assert images.min() >= 0
    assert images.max() <= 1


def test_radii_have_the_density_r_to_the_minus_three():
    """The share of leaves above radius r falls as r^-2. A density r^-2 would miss by far."""
    radii = leaves_of(2000)[2] - 0.5
    assert radii.min() >= 2 - 1e-5
    assert radii.max() <= 24 + 1e-4
    for r in (3.0, 6.0, 12.0):
        expected = (r**-2 - 24.0**-2) / (2.0**-2 - 24.0**-2)
        assert float((radii > r).float().mean()) == pytest.approx(expected, rel=0.08)


def test_one_formula_draws_ellipses_rectangles_and_diamonds():
    """The distances of the three kinds, by their textbook formulas in the axes of the leaf."""
    (u, v), bend, _, _ = leaves_of(200)
    position = torch.tensor([5.0, 9.0, 1.0])
    u, v, bend = (u @ position).double(), (v @ position).double(), bend.squeeze(-1)
    d = (u**2 + v**2 + bend * (u * v).abs()).sqrt()
    assert set(bend.unique().tolist()) == {0.0, 2.0}
    assert torch.allclose(d, torch.where(bend == 0, torch.hypot(u, v), u.abs() + v.abs()), atol=1e-5)
    a, b = 3.0, -1.5  # a rectangle is a diamond in turned coordinates
    assert abs((a + b) / 2) + abs((a - b) / 2) == max(abs(a), abs(b))


def test_every_kind_of_leaf_is_drawn():
    bend = leaves_of(500)[1]
    assert float((bend == 0).float().mean()) == pytest.approx(1 / 3, abs=0.02)


def test_a_line_is_zero_at_its_point_and_has_its_slopes():
    one = torch.ones(())
    line = _line(2 * one, -3 * one, 5 * one, 7 * one)
    assert float(line @ torch.tensor([5.0, 7.0, 1.0])) == 0
    assert float(line @ torch.tensor([6.0, 7.0, 1.0])) == 2


def test_images_have_edges_where_noise_has_none():
    """Kurtosis of neighbouring differences: 3 for Gaussian fields, far more where flat parts meet at edges."""

    def kurtosis(images):
        d = images.diff(dim=-1).flatten()
        return float((d - d.mean()).pow(4).mean() / d.var().square())

    assert kurtosis(draw()) > 8
    assert kurtosis(WhiteNoise().draw(64, SHAPE, torch.Generator().manual_seed(0))) < 4


def test_without_texture_a_large_leaf_is_flat():
    image = draw(1, texture=0.0, shading=0.0, leaves=1, smallest=400.0)
    assert float(image.flatten(2).std(2).max()) < 1e-6


def test_grey_images_have_equal_channels_and_coloured_ones_have_not():
    grey = draw(4, grey=True)
    assert grey.shape == (4, *SHAPE)
    assert torch.equal(grey[:, 0], grey[:, 2])
    coloured = draw(4)
    assert not torch.allclose(coloured[:, 0], coloured[:, 2], atol=0.05)


def test_number_of_leaves_follows_the_area():
    assert len(leaves_of(1, (3, 32, 32))[2]) == 40
    assert len(leaves_of(1, (3, 64, 64))[2]) == 160
    assert len(leaves_of(1, (3, 2, 2))[2]) == 1


def test_images_are_turned_in_every_direction():
    """Leaves have no favoured direction: rows and columns differ alike."""
    images = draw(512)
    down, across = images.diff(dim=-2).std(), images.diff(dim=-1).std()
    assert math.isclose(down, across, rel_tol=0.03)


@pytest.mark.parametrize("wrong", [{"leaves": 0}, {"smallest": 0.0}, {"largest": math.nan}])
def test_leaves_that_do_not_exist_are_refused(wrong):
    with pytest.raises(ValueError, match="at least one leaf and positive radii"):
        DeadLeaves(**wrong)


@pytest.mark.parametrize("wrong", [{"texture": -0.1}, {"shading": 2.0}])
def test_shares_are_checked(wrong):
    with pytest.raises(ValueError, match="from 0 to 1"):
        DeadLeaves(**wrong)
