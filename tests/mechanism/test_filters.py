import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectral_dp.mechanism.filters import (
    AdaptiveFilter,
    AnnealedFilter,
    LowPassFilter,
    PaperBandFilter,
    ShapedFilter,
)
from spectral_dp.mechanism.transforms import get_transform

TRANSFORMS = ["fourier", "dct", "haar", "hadamard", "identity"]
fourier, dct = get_transform("fourier"), get_transform("dct")


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(TRANSFORMS),
    st.sampled_from([(1,), (8,), (64,), (4, 4), (8, 2), (16, 16)]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["lowest", "box"]),
)
def test_low_pass_drops_at_least_the_ratio_of_real_degrees_of_freedom(name, shape, ratio, region):
    """Counting complex coefficients instead would keep up to twice as much noise as Proposition 1 promises."""
    transform = get_transform(name)
    gains = LowPassFilter(ratio, region=region).gains(transform, shape)
    lowest = (transform.frequencies(shape) == 0).all(-1)
    assert bool(gains.kept[lowest].all()), "the lowest frequency is never dropped"
    assert int(gains.kept.sum()) <= max((1 - ratio) * math.prod(shape) + 1e-6, int(lowest.sum()))
    assert gains.noise_variance == pytest.approx(1 - gains.effective_ratio)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from([(8,), (9,), (6, 6), (5, 8)]), st.floats(0, 0.99), st.sampled_from(["lowest", "box"]))
def test_whole_frequencies_only(shape, ratio, region):
    """Half a frequency (its sine without its cosine) would give a noise variance that depends on the position."""
    kept = LowPassFilter(ratio, region=region).gains(fourier, shape).kept
    f = fourier.frequencies(shape).abs()
    for frequency in torch.unique(f.flatten(0, -2), dim=0):
        together = kept[(f == frequency).all(-1)]
        assert bool(together.all()) or not bool(together.any())


def test_low_pass_keeps_the_largest_band_that_fits():
    assert LowPassFilter(0.375).gains(fourier, 8).kept.int().tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert LowPassFilter(0.5).gains(dct, 8).kept.int().tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    lowest = LowPassFilter(1 / 3).gains(dct, (3, 3)).kept.int().tolist()
    assert lowest == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]
    box = LowPassFilter(1 / 3, region="box").gains(dct, (3, 3)).kept.int().tolist()
    assert box == [[1, 1, 0], [1, 1, 0], [0, 0, 0]]


def test_the_box_of_corollary_1():
    gains = LowPassFilter(0.75, region="box").gains(dct, (16, 16))
    assert gains.kept.nonzero().max() == 7
    assert gains.noise_variance == pytest.approx(8**2 / 16**2)


def test_paper_band_is_no_low_pass_on_a_real_signal():
    """Section 1.3 of the design: for d = 8 and ρ = 0.5 seven of eight real dimensions survive."""
    assert PaperBandFilter(0.5).gains(fourier, 8).kept.int().tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert LowPassFilter(0.5).gains(fourier, 8).effective_ratio == 0.625
    assert PaperBandFilter(0.5).gains(fourier, 8).effective_ratio == 0.125


@pytest.mark.parametrize("shape", [(7,), (8,), (5, 5), (6, 4), (4, 7)])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 0.8, 0.99])
def test_paper_band_equals_zeroing_the_full_spectrum(shape, ratio):
    """Against the definition: zero the last coefficients of fft(x), mirror what is kept, transform back."""
    band = torch.ones(shape, dtype=torch.bool)
    for dim, n in enumerate(shape):
        keep = torch.arange(n) < max(1, math.floor((1 - ratio) * n + 1e-9))
        band &= keep.view([-1 if d == dim else 1 for d in range(len(shape))])
    mirrored = band.clone()
    for idx in band.nonzero().tolist():
        mirrored[tuple(-i % n for i, n in zip(idx, shape, strict=True))] = True
    x = torch.randn(*shape, dtype=torch.float64)
    expected = torch.fft.ifftn(torch.fft.fftn(x) * mirrored).real
    dims = tuple(range(-len(shape), 0))
    mask = PaperBandFilter(ratio).gains(fourier, shape).post
    torch.testing.assert_close(fourier.inverse(fourier.forward(x, dims) * mask, dims), expected)


def test_order_decides_whether_dropped_coordinates_count_in_the_clip():
    before = LowPassFilter(0.5).gains(dct, 4)
    after = LowPassFilter(0.5, order="clip_then_filter").gains(dct, 4)
    assert before.pre.tolist() == before.post.tolist() == after.post.tolist() == [1, 1, 0, 0]
    assert after.pre.tolist() == [1, 1, 1, 1]
    assert after.kept.tolist() == before.kept.tolist()


def test_shaped_keeps_the_signal_and_reports_its_noise():
    gains = ShapedFilter(torch.tensor([2.0, 1.0, 0.5, 0.0])).gains(dct, 4)
    assert (gains.pre * gains.post).tolist() == [1, 1, 1, 0]
    assert gains.noise_variance == pytest.approx((0.25 + 1 + 4) / 4)
    assert gains.effective_ratio == 0.25
    wiener = ShapedFilter(torch.ones(2), post=torch.tensor([1.0, 0.1])).gains(dct, 2)
    assert wiener.noise_variance == pytest.approx((1 + 0.01) / 2)


def test_shaping_by_second_moments_beats_no_shaping():
    """The figure of merit for a fixed bound on E||z||²: the noise after shaping, at the same expected norm."""
    s = torch.tensor([100.0, 10.0, 1.0, 0.01], dtype=torch.float64)
    gains = ShapedFilter.from_second_moment(s).gains(dct, 4)
    assert gains.pre.log().mean().item() == pytest.approx(0, abs=1e-12)

    def noise_at_equal_norm(pre, post):
        return float((pre**2 * s).sum() * (post**2).sum())

    ones = torch.ones(4, dtype=torch.float64)
    assert noise_at_equal_norm(gains.pre, gains.post) < 0.6 * noise_at_equal_norm(ones, ones)


def test_annealed_follows_its_schedule_and_stays_at_the_end():
    filter = AnnealedFilter(start=0.75, end=0.0, steps=10)
    kept = [int(filter.gains(dct, 8, step).kept.sum()) for step in (0, 5, 10, 1000)]
    assert kept == [2, 5, 8, 8]
    cosine = AnnealedFilter(start=0.0, end=0.5, steps=10, schedule="cosine")
    assert cosine.ratio(0) == 0
    assert cosine.ratio(5) == pytest.approx(0.25)
    assert cosine.ratio(10) == pytest.approx(0.5)


class TestAdaptive:
    noise_std = 0.5

    def release(self, blocks=400):
        """Signal of power 4 on the first two coordinates, none on the others; noise of known deviation."""
        signal = torch.cat([2 * torch.randn(blocks, 2), torch.zeros(blocks, 6)], dim=1)
        return signal + self.noise_std * torch.randn(blocks, 8)

    def test_learns_which_coefficients_are_noise(self):
        filter = AdaptiveFilter(floor=0.01)
        assert filter.gains(fourier, 8).is_identity, "before anything is released it does nothing"
        for _ in range(40):
            filter.observe(self.release(), self.noise_std)
        post = filter.gains(fourier, 8).post
        torch.testing.assert_close(post[:2], torch.full((2,), 4 / 4.25, dtype=torch.float64), atol=0.02, rtol=0)
        assert bool((post[2:] < 0.1).all())
        assert bool((post[2:] >= 0.01).all()), "above the floor: nothing is lost for good"
        assert filter.gains(fourier, 8).noise_variance < 0.3

    def test_gains_depend_on_releases_only(self):
        """Two filters shown the same releases agree, whatever else happened; asking for gains changes nothing."""
        first, second = AdaptiveFilter(0.2), AdaptiveFilter(0.2)
        kept = int(first.gains(fourier, 8).kept.sum())
        for _ in range(3):
            shown = torch.randn(7, kept)
            first.observe(shown, 1.0)
            second.gains(fourier, 8)
            second.observe(shown.clone(), 1.0)
        assert first.gains(fourier, 8).post.tolist() == second.gains(fourier, 8).post.tolist()

    def test_state_survives_a_checkpoint(self):
        filter, resumed = AdaptiveFilter(), AdaptiveFilter()
        filter.observe(self.release(), self.noise_std)
        resumed.load_state_dict(filter.state_dict())
        for f in (filter, resumed):
            f.observe(torch.ones(3, 8), self.noise_std)
        assert filter.gains(fourier, 8).post.tolist() == resumed.gains(fourier, 8).post.tolist()

    def test_one_block_each(self):
        filter = AdaptiveFilter()
        filter.observe(torch.randn(2, 8), 1.0)
        with pytest.raises(ValueError, match="of its own"):
            filter.observe(torch.randn(2, 9), 1.0)
        with pytest.raises(ValueError, match="of its own"):
            filter.gains(fourier, 9)

    def test_accepts_a_single_row(self):
        filter = AdaptiveFilter()
        filter.observe(torch.ones(8), 0.5)
        assert filter.gains(fourier, 8).post[0] == pytest.approx(0.75)


@pytest.mark.parametrize("ratio", [1.0, 1.5, -0.1, math.nan, math.inf])
def test_ratios_out_of_range_are_refused(ratio):
    for make in (
        LowPassFilter,
        PaperBandFilter,
        AdaptiveFilter,
        lambda r: AnnealedFilter(r, 0.0, 5),
        lambda r: AnnealedFilter(0.0, r, 5),
    ):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            make(ratio)


@pytest.mark.parametrize("bad", [[1.0, -0.5], [1.0, math.nan], [1.0, math.inf]])
def test_bad_gains_are_refused_where_they_are_given(bad):
    with pytest.raises(ValueError, match="finite and not negative"):
        ShapedFilter(torch.tensor(bad))
    with pytest.raises(ValueError, match="finite and not negative"):
        ShapedFilter(torch.ones(2), post=torch.tensor(bad))


def test_other_bad_input_is_explained():
    with pytest.raises(ValueError, match="every coordinate"):
        ShapedFilter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(3,\).*\(4,\)"):
        ShapedFilter(torch.ones(3)).gains(dct, 4)
    with pytest.raises(ValueError, match="'lowest', 'box'"):
        LowPassFilter(0.5, region="disc")
    with pytest.raises(ValueError, match="clip_then_filter"):
        LowPassFilter(0.5, order="clip")
    with pytest.raises(ValueError, match="LowPassFilter"):
        PaperBandFilter(0.5).gains(dct, 8)
    with pytest.raises(ValueError, match="'linear', 'cosine'"):
        AnnealedFilter(0.5, 0.0, 5, schedule="exponential")
    with pytest.raises(ValueError, match="at least 1"):
        AnnealedFilter(0.5, 0.0, 0)
    with pytest.raises(ValueError, match="another filter"):
        LowPassFilter(0.5).load_state_dict({"power": []})
    with pytest.raises(ValueError, match="AdaptiveFilter"):
        AdaptiveFilter().load_state_dict({})
    with pytest.raises(ValueError, match="positive"):
        ShapedFilter.from_second_moment(torch.tensor([1.0, 0.0]))
    for wrong in ({"decay": 1.0}, {"floor": 0.0}):
        with pytest.raises(ValueError, match="must be in"):
            AdaptiveFilter(**wrong)
