"""Gains: which coordinates are released, which count in the clip, and how much noise is left."""

import math

import pytest
import torch

from spectral_dp.mechanism.filters import IdentityFilter, LowPassFilter
from spectral_dp.mechanism.gains import Gains
from spectral_dp.mechanism.transforms import get_transform

dct = get_transform("dct")


def test_a_coordinate_is_kept_if_both_of_its_gains_are_positive():
    gains = Gains(torch.tensor([2.0, 1.0, 0.0, 0.0]), torch.tensor([0.5, 0.0, 1.0, 0.0]))
    assert gains.kept.tolist() == [True, False, False, False]
    assert gains.index.tolist() == [0]
    assert gains.count == 1
    assert gains.effective_ratio == 0.75


def test_what_counts_in_the_clip_is_decided_by_the_pre_gains():
    """Catches a norm taken over the released coordinates only, where the paper clips before it filters."""
    gains = Gains(torch.ones(3), torch.tensor([1.0, 0.0, 1.0]))
    assert gains.counted.tolist() == [True, True, True]
    assert gains.clips_dropped
    assert not Gains(torch.tensor([1.0, 0.0, 1.0]), torch.ones(3)).clips_dropped


def test_compress_and_expand():
    gains = LowPassFilter(0.5).gains(dct, (2, 2))
    z = torch.arange(8.0).view(2, 2, 2)
    assert gains.compress(z).tolist() == [[0], [4]]
    assert gains.expand(gains.compress(z)).tolist() == [[[0, 0], [0, 0]], [[4, 0], [0, 0]]]
    everything = IdentityFilter().gains(dct, (2, 2))
    torch.testing.assert_close(everything.expand(everything.compress(z)), z)


@pytest.mark.parametrize("kept", [[1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
def test_compress_and_expand_undo_each_other_for_any_mask(kept):
    """Catches a mask that is taken for a prefix, which only low-passes in one dimension are."""
    mask = torch.tensor(kept, dtype=torch.bool)
    gains, z = Gains(mask, mask), torch.randn(3, 4)
    assert torch.equal(gains.compress(z), z[:, mask])
    assert torch.equal(gains.expand(gains.compress(z)), z * mask)


def test_gains_of_one_are_left_out_of_the_step():
    ones = torch.ones(4)
    identity = Gains(ones, ones)
    assert identity.is_identity
    assert identity.keeps_all
    assert identity.kept_pre is identity.kept_post is None
    masked = LowPassFilter(0.5).gains(dct, 4)
    assert not masked.is_identity
    assert masked.kept_pre is masked.kept_post is None
    shaped = Gains(torch.tensor([2.0, 0.0, 4.0]), torch.tensor([0.5, 0.0, 1.0]))
    assert shaped.kept_pre.tolist() == [2.0, 4.0]
    assert shaped.kept_post.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("transform", ["fourier", "dct"])
def test_the_noise_variance_is_that_of_the_output(transform):
    """Proposition 1 by the covariance itself: the mean of the diagonal of B^t diag(b²) B; for Fourier, all of it."""
    n = 9
    gains = LowPassFilter(0.4).gains(get_transform(transform), n)
    weighted = get_transform(transform).basis(n) * (gains.post * gains.kept).double()[:, None]
    variances = weighted.square().sum(0)
    assert variances.mean().item() == pytest.approx(gains.noise_variance)
    assert gains.noise_variance == pytest.approx(gains.count / n)
    if transform == "fourier":
        assert variances.tolist() == pytest.approx([gains.noise_variance] * n)


def test_a_number_expanded_to_a_shape_counts_as_often_as_it_is_shown():
    """Catches counts of what is in memory, where one number stands for all."""
    one = torch.ones((), dtype=torch.bool).expand(4, 4)
    gains = Gains(one, one)
    assert gains.count == 16
    assert gains.index.tolist() == list(range(16))
    assert gains.noise_variance == 1


@pytest.mark.parametrize("bad", [-0.5, math.nan, math.inf])
def test_bad_gains_are_refused(bad):
    good, wrong = torch.ones(2), torch.tensor([1.0, bad])
    for pre, post in ((wrong, good), (good, wrong)):
        with pytest.raises(ValueError, match="finite and not negative"):
            Gains(pre, post)


def test_gains_that_do_not_fit_or_drop_everything_are_refused():
    with pytest.raises(ValueError, match="differ"):
        Gains(torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match="every coordinate"):
        Gains(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
