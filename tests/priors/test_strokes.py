"""Pen strokes: bright curves on a dark ground, of the thickness of their pen."""

import pytest
import torch

from spectral_dp.priors import PenStrokes

SHAPE = (1, 28, 28)


def draw(count=256, shape=SHAPE, seed=0, **settings):
    return PenStrokes(**settings).draw(count, shape, torch.Generator().manual_seed(seed))


def test_the_ground_is_dark_and_the_ink_is_bright():
    images = draw()
    assert float((images < 0.05).float().mean()) > 0.6
    assert float(images.amax((1, 2, 3)).median()) > 0.5
    assert images.min() >= 0
    assert images.max() <= 1


def test_a_thicker_pen_leaves_more_ink():
    thin, thick = draw(thinnest=0.02, thickest=0.02), draw(thinnest=0.08, thickest=0.08)
    assert thick.mean() > 2 * thin.mean()


def test_ink_is_as_wide_as_the_pen():
    """A straight stroke of half width w has the area of a stadium, up to the soft edge and the blur."""
    settings = {"most_strokes": 1, "thinnest": 0.05, "thickest": 0.05, "longest": 0.5, "most_turns": 0.0}
    image = PenStrokes(**settings).draw(200, (1, 80, 80), torch.Generator().manual_seed(1))
    ink = image.flatten(1).sum(1) / image.flatten(1).amax(1)
    w, longest = 4.0, 40.0
    assert float(ink.min()) > 0.8 * (2 * w * 0.2 * longest)
    assert float(ink.max()) < 1.2 * (2 * w * longest + 3.2 * w**2)


@pytest.mark.parametrize("side", [28, 80])
def test_strokes_have_no_gaps(side):
    """A stroke of the thinnest pen is one piece: its points are not further apart than the pen is wide."""
    x, y = PenStrokes(most_strokes=1)._points(100, side, side, torch.Generator().manual_seed(0))
    steps = torch.hypot(x.diff(dim=0), y.diff(dim=0))
    assert float(steps.max()) <= max(1.5, 0.02 * side) + 1e-4


def test_numbers_of_strokes_vary_from_one_on():
    x, _ = PenStrokes()._points(2000, 28, 28, torch.Generator().manual_seed(0))
    used = (x.unflatten(0, (-1, 4))[0] < 100).sum(0)
    assert torch.bincount(used, minlength=5)[1:].min() > 400
    assert used.min() == 1


def test_curvature_bends_strokes():
    """The distance between the ends of a straight stroke is its length; a bent stroke is shorter across."""

    def reach(turns):
        settings = PenStrokes(most_strokes=1, most_turns=turns)
        x, y = settings._points(500, 28, 28, torch.Generator().manual_seed(0))
        path = torch.hypot(x.diff(dim=0), y.diff(dim=0)).sum(0)
        return float((torch.hypot(x[-1] - x[0], y[-1] - y[0]) / path).mean())

    assert reach(0.0) == pytest.approx(1, abs=1e-4)
    assert reach(0.7) < 0.8


def test_colours_differ_between_channels():
    images = draw(16, (3, 20, 20))
    assert not torch.allclose(images[:, 0], images[:, 1], atol=0.02)


@pytest.mark.parametrize("wrong", [{"most_strokes": 0}, {"thinnest": 0.1}, {"thinnest": 0.0}, {"longest": 0.0}])
def test_pens_that_do_not_exist_are_refused(wrong):
    with pytest.raises(ValueError, match="at least one stroke"):
        PenStrokes(**wrong)
