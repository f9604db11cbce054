"""Statistics of channels: public ones cost nothing; private ones are clipped, noised, charged, and proven so."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.extractors import Scaled
from tests.support.silent import Silent

from spectral_dp import Relation
from spectral_dp.accounting import Ledger, gaussian_epsilon
from spectral_dp.features import (
    ChannelStatistics,
    FeatureError,
    FeatureRows,
    private_channel_statistics,
    public_channel_statistics,
)
from spectral_dp.features.normalization import JOINT_BOUND, ChannelNormalization, moments, release_moments
from spectral_dp.mechanism.noise import SeededNoise

C = 6
PUBLIC = ChannelStatistics(torch.linspace(-1, 1, C), torch.linspace(0.5, 2, C))


def maps(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, C, 4, 4, generator=generator)
    return (PUBLIC.mean.view(-1, 1, 1) + PUBLIC.std.view(-1, 1, 1) * (0.7 * x + 0.3)).half()


def release(rows, sigma=2.0, ledger=None, noise=None, records=None):
    return private_channel_statistics(
        FeatureRows(rows),
        PUBLIC,
        noise_multiplier=sigma,
        records=records or max(len(rows), 1),
        ledger=Ledger() if ledger is None else ledger,
        noise=noise or SeededNoise(0, reproducibility_over_privacy=True),
    )


class TestWhatIsReleased:
    def test_without_noise_it_is_the_mean_and_the_deviation(self):
        rows = maps(2000)
        found, x = release(rows, noise=Silent()), rows.double()
        assert torch.allclose(found.mean.double(), x.mean((0, 2, 3)), atol=2e-2)
        assert torch.allclose(found.std.double(), x.std((0, 2, 3)), rtol=3e-2)

    def test_vectors_are_channels_of_one_position(self):
        rows = maps(300)[:, :, :1, :1]
        one, two = release(rows, noise=Silent()), release(rows[:, :, 0, 0], noise=Silent())
        assert torch.allclose(one.mean, two.mean)
        assert torch.allclose(one.std, two.std)

    def test_parts_do_not_matter(self, monkeypatch):
        rows, whole = maps(50), release(maps(50), noise=Silent())
        monkeypatch.setattr("spectral_dp.features.normalization._ROWS_AT_ONCE", 7)
        assert torch.allclose(release(rows, noise=Silent()).mean, whole.mean, atol=1e-6)

    def test_is_divided_by_the_public_number_of_records(self):
        """Catches a division by how many there are, which is private."""
        one, two = (release(maps(50), noise=Silent(), records=n).mean - PUBLIC.mean for n in (50, 100))
        assert torch.allclose(one, 2 * two, rtol=1e-4)

    def test_without_records_there_is_noise_alone(self):
        assert bool((release(maps(0), records=100).std > 0).all())

    @pytest.mark.parametrize("relation", list(Relation))
    def test_noise_has_the_claimed_law_and_no_other(self, relation):
        """Accepts the right scale, and rejects two thirds and three halves of it."""
        noise, sigma, ledger = SeededNoise(1, reproducibility_over_privacy=True), 3.0, Ledger(relation)
        empty = torch.zeros(0, 400).double()
        drawn = torch.cat(
            [release_moments([empty], noise_multiplier=sigma, ledger=ledger, noise=noise) for _ in range(5)]
        )
        scale = sigma * JOINT_BOUND * (1 if relation is Relation.ADD_OR_REMOVE_ONE else 2)
        p_value = {f: stats.kstest(np.asarray(drawn) / (f * scale), "norm").pvalue for f in (2 / 3, 1, 3 / 2)}
        assert p_value[1] > 1e-3
        assert max(p_value[2 / 3], p_value[3 / 2]) < 1e-6

    def test_noise_differs_between_releases(self):
        parts = [torch.zeros(0, 8).double()]
        one, two = (release_moments(parts, noise_multiplier=1.0, ledger=Ledger()) for _ in range(2))
        assert not torch.equal(one, two)


HOSTILE = {
    "ordinary": lambda x: x,
    "a million times as large": lambda x: x.float() * 1e6,
    "zeros": torch.zeros_like,
    "not a number": lambda x: torch.full_like(x, torch.nan),
    "infinite": lambda x: torch.full_like(x, -torch.inf),
    "one number": lambda x: x.float().index_fill(1, torch.tensor([2]), 1e9),
}


class TestSensitivity:
    @pytest.mark.filterwarnings("ignore:some contributions")
    @pytest.mark.parametrize("others", [0, 1, 30])
    @pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
    def test_one_record_moves_the_sum_by_at_most_the_bound(self, change, others):
        rest, one = moments(maps(others, 1).float(), PUBLIC), moments(change(maps(1)).float(), PUBLIC)
        with_it, without = (
            release_moments(parts, noise_multiplier=1.0, ledger=Ledger(), noise=Silent())
            for parts in ([rest, one], [rest])
        )
        assert (with_it - without).norm() <= JOINT_BOUND

    def test_the_bound_is_reached(self):
        """Else it would claim more noise than it needs, or the test above would see nothing."""
        one = moments(maps(1).float() * 1e3, PUBLIC)
        assert (
            release_moments([one], noise_multiplier=1.0, ledger=Ledger(), noise=Silent()).norm() > 0.999 * JOINT_BOUND
        )

    def test_negative_control_without_the_clip_it_is_exceeded(self):
        assert moments(maps(1).float() * 1e3, PUBLIC).norm() > JOINT_BOUND


class TestAccounting:
    def test_is_charged_as_one_unsampled_gaussian(self):
        ledger = Ledger()
        release(maps(10), sigma=8.0, ledger=ledger)
        assert ledger.phases == ((8.0, 1.0, 1),)
        assert ledger.epsilon(1e-5) == pytest.approx(gaussian_epsilon(8.0, 1e-5), rel=1e-3)

    def test_is_charged_before_it_is_released(self):
        """Catches a release that a failure between the two would leave uncharged."""
        ledger = Ledger()

        class Failing(Silent):
            def normal(self, shape, **_):
                assert ledger.steps == 1
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            release(maps(10), ledger=ledger, noise=Failing())
        assert ledger.steps == 1

    @pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan])
    def test_without_noise_nothing_is_released(self, sigma):
        ledger = Ledger()
        with pytest.raises(FeatureError, match="positive noise_multiplier"):
            release(maps(10), sigma=sigma, ledger=ledger)
        assert ledger.steps == 0

    def test_maps_of_other_channels_are_refused(self):
        with pytest.raises(FeatureError, match=r"\(N, 6, H, W\)"):
            release(torch.zeros(3, 5, 4, 4))


class TestPublic:
    def test_reads_no_record_and_is_always_the_same(self):
        one, two = (public_channel_statistics(Scaled(), (1, 8, 8), images=64) for _ in range(2))
        assert torch.equal(one.mean, two.mean)
        assert one.std[1] == pytest.approx(2 * one.std[0].item(), rel=1e-4)
        assert bool((one.std > 0).all())


class TestModule:
    def test_normalises_maps_and_their_cosines_alike(self):
        from spectral_dp.features import Prepared

        maps_, statistics = torch.randn(3, C, 4, 4), PUBLIC
        plain, spectrum = ChannelNormalization(C), ChannelNormalization(C, spectrum=16)
        for module in (plain, spectrum):
            module.set(statistics)
        cosines = Prepared(ratio=0.5).module((C, 4, 4))
        assert torch.allclose(spectrum(cosines(maps_)), cosines(plain(maps_)), atol=1e-5)

    def test_is_the_identity_until_it_is_set_and_is_saved(self):
        module, x = ChannelNormalization(C), torch.randn(2, C, 3, 3)
        assert torch.equal(module(x), x)
        module.set(PUBLIC)
        other = ChannelNormalization(C)
        other.load_state_dict(module.state_dict())
        assert torch.equal(other(x), module(x))

    def test_wrong_statistics_are_refused(self):
        for bad in (
            ChannelStatistics(torch.zeros(3), torch.ones(3)),
            ChannelStatistics(torch.zeros(C), torch.zeros(C)),
        ):
            with pytest.raises(FeatureError, match="positive deviations"):
                ChannelNormalization(C).set(bad)
