"""Random views: the right law, independent for each view, the views of a sample side by side."""

import pytest
import torch
from scipy import stats
from torch.nn import functional

from spectral_dp.data import DataError, random_views

SIDE, SHIFT = 9, 2
LEVEL = 1e-4


def offsets(views, *, images):
    """How far the one bright pixel of each view is from the centre: (images * views, 2)."""
    position = views.flatten(1).int().argmax(1)
    return torch.stack([position // SIDE, position % SIDE], dim=1).view(images, -1, 2) - SIDE // 2


def dots(count):
    images = torch.zeros(count, 1, SIDE, SIDE, dtype=torch.uint8)
    images[:, :, SIDE // 2, SIDE // 2] = 255
    return images


def shifts_are_uniform(moved):
    """Over all (2 SHIFT + 1)^2 places."""
    if moved.abs().max() > SHIFT:
        return False
    cell = (moved[..., 0] + SHIFT) * (2 * SHIFT + 1) + moved[..., 1] + SHIFT
    counts = cell.flatten().bincount(minlength=(2 * SHIFT + 1) ** 2)
    return stats.chisquare(counts.numpy()).pvalue > LEVEL


def views_are_independent(moved):
    """The first two views of a sample: every pair of vertical shifts is equally likely."""
    pair = (moved[:, 0, 0] + SHIFT) * (2 * SHIFT + 1) + moved[:, 1, 0] + SHIFT
    return stats.chisquare(pair.bincount(minlength=(2 * SHIFT + 1) ** 2).numpy()).pvalue > LEVEL


def test_shifts_are_uniform_and_independent():
    moved = offsets(random_views(dots(2000), 2, flip=False, shift=SHIFT), images=2000)
    assert shifts_are_uniform(moved)
    assert views_are_independent(moved)


def test_the_checks_of_shifts_can_fail():
    smaller = offsets(random_views(dots(2000), 2, flip=False, shift=SHIFT - 1), images=2000)
    assert not shifts_are_uniform(smaller)
    larger = offsets(random_views(dots(2000), 2, flip=False, shift=SHIFT + 1), images=2000)
    assert not shifts_are_uniform(larger)
    one_for_all = random_views(dots(2000), 1, flip=False, shift=SHIFT).repeat_interleave(2, dim=0)
    assert not views_are_independent(offsets(one_for_all, images=2000))


def flipped(views):
    """Of images that are dark left and bright right: which are mirrored."""
    return views[:, 0, 0, 0] > views[:, 0, 0, -1]


def gradient(count):
    return torch.arange(SIDE, dtype=torch.uint8).expand(count, 1, SIDE, SIDE)


def test_half_are_flipped_independently():
    mirrored = flipped(random_views(gradient(2000), 2, flip=True, shift=0)).view(2000, 2).int()
    pairs = (2 * mirrored[:, 0] + mirrored[:, 1]).bincount(minlength=4)
    assert stats.chisquare(pairs.numpy()).pvalue > LEVEL
    assert not flipped(random_views(gradient(2000), 2, flip=False, shift=0)).any()


def test_flips_and_shifts_are_independent():
    images = gradient(4000) + 100
    views = random_views(images, 1, flip=True, shift=1)
    dark_top = views[:, 0, 0].eq(0).all(-1)  # shifted downwards: a row of zeros came in
    bottom_middle = views[:, 0, SIDE // 2]
    mirrored = bottom_middle[:, 3] > bottom_middle[:, 5]
    table = torch.stack([dark_top[mirrored].int().bincount(), dark_top[~mirrored].int().bincount()])
    assert stats.chi2_contingency(table.numpy()).pvalue > LEVEL


def views_are_adjacent(views, samples):
    """Of images that are their own number all over."""
    return views[:, 0, SIDE // 2, SIDE // 2].tolist() == [
        i for i in range(samples) for _ in range(len(views) // samples)
    ]


@pytest.mark.parametrize("shift", [0, SHIFT])
@pytest.mark.parametrize("flip", [True, False])
def test_views_of_a_sample_are_neighbours(flip, shift):
    images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 1, SIDE, SIDE)
    views = random_views(images, 3, flip=flip, shift=shift)
    assert views.shape == (15, 1, SIDE, SIDE)
    assert views_are_adjacent(views, 5)
    assert not views_are_adjacent(images.repeat(3, 1, 1, 1), 5), "the control: views of the batch one after another"


def test_a_view_is_a_window_of_the_padded_image():
    image = torch.randint(256, (1, 3, 5, 7), dtype=torch.uint8)
    padded = functional.pad(image.float(), (2, 2, 2, 2))
    windows = {
        tuple(padded[..., row : row + 5, column : column + 7].flatten().tolist())
        for row in range(5)
        for column in range(5)
    }
    views = random_views(image, 400, flip=False, shift=2)
    assert {tuple(view.flatten().float().tolist()) for view in views} == windows


def test_channels_stay_together_and_types_stay():
    images = torch.randint(256, (4, 1, 6, 6), dtype=torch.uint8).expand(4, 3, 6, 6)
    views = random_views(images, 5, flip=True, shift=2)
    assert views.dtype == torch.uint8
    assert torch.equal(views[:, 0], views[:, 1])
    assert torch.equal(views[:, 0], views[:, 2])
    assert random_views(images.float(), 2, flip=True, shift=2).dtype == torch.float32


def test_reproducible_with_a_generator():
    images = torch.randint(256, (8, 3, 6, 6), dtype=torch.uint8)
    draw = lambda seed: random_views(images, 4, flip=True, shift=2, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_nothing_to_do():
    images = torch.randint(256, (4, 3, 6, 6), dtype=torch.uint8)
    assert torch.equal(random_views(images, 1, flip=False, shift=0), images)
    assert random_views(images[:0], 3, flip=True, shift=2).shape == (0, 3, 6, 6), "an empty Poisson batch"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"augmentation_multiplicity": 0}, "got 0 and 1"),
        ({"shift": -1}, "got 2 and -1"),
        ({"images": torch.zeros(3, 4, 4)}, r"got shape \(3, 4, 4\)"),
    ],
)
def test_refused(change, reason):
    arguments = {"images": torch.zeros(2, 3, 4, 4), "augmentation_multiplicity": 2, "flip": True, "shift": 1} | change
    with pytest.raises(DataError, match=reason):
        random_views(**arguments)
