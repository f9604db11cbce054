"""The proof obligations of Algorithm 1: linear map, neighbours, noise law, each with controls that must fail."""

import functools
import itertools
import math
import warnings

import pytest
import torch
from tests.support import broken_mechanisms as broken
from tests.support.privacy_checks import (
    MAX_NORM,
    SIGMA,
    change_of_noise,
    every_call_p_value,
    largest_movement,
    noise_law_p_values,
    noise_off,
    true_noise_multiplier,
)

from spectral_dp.mechanism.clipping import ROUNDING_GUARD, Clipped, NonFiniteWarning
from spectral_dp.mechanism.filters import (
    AdaptiveFilter,
    AnnealedFilter,
    IdentityFilter,
    LowPassFilter,
    PaperBandFilter,
    ShapedFilter,
)
from spectral_dp.mechanism.noise import SeededNoise
from spectral_dp.mechanism.perturbation import add_noise, perturb, perturb_sum
from spectral_dp.mechanism.transforms import get_transform
from spectral_dp.relations import Relation

ALPHA = 1e-4


def seeded(seed=0):
    return SeededNoise(seed, reproducibility_over_privacy=True)


def shaped(n):
    return ShapedFilter(torch.linspace(3, 0.2, n))


def learnt(n):
    filter = AdaptiveFilter(floor=0.1)
    filter.observe(torch.linspace(4, 0, n).repeat(5, 1), 1.0)
    return filter


FILTERS = {
    "identity": lambda n: IdentityFilter(),
    "low-pass": lambda n: LowPassFilter(0.4),
    "low-pass, paper's order": lambda n: LowPassFilter(0.4, order="clip_then_filter"),
    "shaped": shaped,
    "annealed": lambda n: AnnealedFilter(0.6, 0.0, 10),
    "adaptive": learnt,
}
CASES = [
    pytest.param(transform, filter, n, id=f"{transform}-{filter}-{n}")
    for transform, filter, n in itertools.product(["fourier", "dct", "haar", "hadamard", "identity"], FILTERS, [8, 7])
    if n == 8 or transform in ("fourier", "dct", "identity")
] + [
    pytest.param("fourier", "paper band", 8, id="fourier-paper-8"),
    pytest.param("fourier", "paper band", 7, id="fourier-paper-7"),
]


def release(samples, noise, *, transform, filter):
    n = samples.shape[1]
    rule = PaperBandFilter(0.5) if filter == "paper band" else FILTERS[filter](n)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteWarning)
        return perturb_sum(
            samples, max_norm=MAX_NORM, noise_multiplier=SIGMA, transform=transform, filter=rule, noise=noise
        )


@pytest.mark.parametrize(("transform", "filter", "n"), CASES)
def test_every_released_direction_carries_the_claimed_noise(transform, filter, n):
    """Check A. Exact: the worst direction has the claimed multiplier, neither less (a leak) nor more (waste)."""
    measured = true_noise_multiplier(functools.partial(release, transform=transform, filter=filter), n)
    assert SIGMA <= measured <= SIGMA * (1 + 2 * ROUNDING_GUARD)


@pytest.mark.parametrize(("transform", "filter", "n"), CASES)
def test_no_record_moves_the_sum_further_than_the_bound(transform, filter, n):
    """Check B, in the coordinates that are noised: post-gains and inverse are post-processing, so undo them."""
    rule = PaperBandFilter(0.5) if filter == "paper band" else FILTERS[filter](n)
    t = get_transform(transform)
    gains = rule.gains(t, n)

    def noised_sum(samples, noise):
        z = gains.compress(t.forward(release(samples, noise, transform=transform, filter=filter)))
        return z / gains.compress(gains.post)

    assert largest_movement(noised_sum, n) <= MAX_NORM * (1 + 1e-9)


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        (broken.real_only_noise, 0.0),
        (broken.noise_per_sample, SIGMA / 2),
        (broken.unnoised_last_coefficient, 0.0),
        (broken.noise_on_both_halves, SIGMA / math.sqrt(2)),
        (broken.small_noise, 0.9 * SIGMA),
    ],
)
def test_check_a_catches_broken_mechanisms(mechanism, expected):
    for n in (7, 8):
        assert true_noise_multiplier(mechanism, n, batch=4) == pytest.approx(expected, rel=1e-4)


def test_check_b_catches_the_realised_batch_divisor():
    assert largest_movement(broken.realised_batch_divisor, 8) > 1.5 * MAX_NORM


@pytest.mark.parametrize("mechanism", [broken.no_noise_for_large_batches, broken.less_noise_on_large_sums])
def test_check_of_the_noise_catches_what_depends_on_the_batch(mechanism):
    assert true_noise_multiplier(mechanism, 8) >= SIGMA * (1 - 1e-9), "in a small batch nothing is wrong"
    assert change_of_noise(mechanism, 8) > 0.1


def test_every_broken_mechanism_is_caught():
    """The summary: each control fails A, B or the check of the noise, and the sound mechanism fails none."""

    def passes(mechanism):
        return (
            true_noise_multiplier(mechanism, 8) >= SIGMA
            and largest_movement(mechanism, 8) <= MAX_NORM * (1 + 1e-9)
            and change_of_noise(mechanism, 8) < 1e-9
        )

    assert passes(functools.partial(release, transform="fourier", filter="low-pass"))
    assert [mechanism.__name__ for mechanism in broken.ALL if passes(mechanism)] == []


def test_check_c_of_every_call():
    """One release without noise among a thousand: invisible in all of them together, plain in one by itself."""
    zero, noise = torch.zeros(2, 16, dtype=torch.float64), seeded()
    sound = functools.partial(release, transform="identity", filter="identity")
    for mechanism, is_sound in ((sound, True), (broken.counted(broken.no_noise_at_every_1000th_call), False)):
        calls = torch.stack([mechanism(zero, noise) for _ in range(1000)])
        assert min(noise_law_p_values(calls, SIGMA * MAX_NORM)) > ALPHA
        assert (every_call_p_value(calls, SIGMA * MAX_NORM) > ALPHA) == is_sound


@pytest.mark.parametrize("transform", ["fourier", "dct", "haar", "hadamard", "identity"])
@pytest.mark.parametrize("relation", list(Relation))
def test_noise_law(transform, relation):
    """Check C: exactly Gaussian at the right scale on kept coordinates, exactly zero elsewhere; with power."""
    t = get_transform(transform)
    filter = LowPassFilter(0.5)
    out = perturb(
        torch.zeros(3000, 16, dtype=torch.float64),
        sensitivity=MAX_NORM,
        noise_multiplier=SIGMA,
        filter=filter,
        transform=transform,
        batch_dims=1,
        relation=relation,
        noise=seeded(1),
    )
    z = t.forward(out)
    kept = filter.gains(t, 16).kept
    assert float(z[:, ~kept].abs().max()) < 1e-12
    scale = SIGMA * MAX_NORM * (2 if relation is Relation.REPLACE_ONE else 1)
    assert min(noise_law_p_values(z[:, kept], scale)) > ALPHA
    for wrong in (2 / 3, 3 / 2):
        assert max(noise_law_p_values(z[:, kept], scale * wrong)) < ALPHA


@pytest.mark.parametrize("mechanism", [broken.noise_per_sample, broken.noise_on_both_halves, broken.small_noise])
def test_check_c_catches_the_wrong_scale(mechanism):
    noise = seeded()
    samples = torch.stack([mechanism(torch.zeros(4, 64, dtype=torch.float64), noise) for _ in range(300)])
    assert noise_law_p_values(samples, SIGMA * MAX_NORM)[0] < ALPHA


def test_noise_does_not_depend_on_the_number_of_records():
    """Check C for the realised divisor: an empty batch is noised like a full one."""
    one, none = (
        perturb_sum(
            torch.zeros(size, 8),
            max_norm=1.0,
            noise_multiplier=1.0,
            divisor=4,
            transform="dct",
            noise=seeded(5),
        )
        for size in (7, 0)
    )
    torch.testing.assert_close(one, none, rtol=0, atol=0)
    wrong = [broken.realised_batch_divisor(torch.zeros(size, 8), seeded(5)) for size in (7, 1)]
    assert not torch.allclose(*wrong)


def test_noise_is_fresh_for_every_query_and_call():
    query = torch.zeros(4, 32)
    kwargs = {"sensitivity": 1.0, "noise_multiplier": 1.0, "batch_dims": 1}
    source = seeded()
    draws = torch.cat([perturb(query, noise=source, **kwargs) for _ in range(2)] + [perturb(query, **kwargs)])
    correlation = torch.corrcoef(draws) - torch.eye(len(draws))
    assert float(correlation.abs().max()) < 0.75


def test_algorithm_1_as_printed_releases_the_odd_part_of_the_signal():
    """Real noise on complex coefficients: subtract the mirror image and the noise is gone, whatever σ."""
    torch.manual_seed(0)
    secret = torch.randn(1, 16, dtype=torch.float64)
    secret *= MAX_NORM / 2 / secret.norm()
    odd_part = (secret - secret.flip(1).roll(1, 1)) / 2

    def odd(out):
        return (out - out.flip(-1).roll(1, -1)) / 2

    printed = broken.real_only_noise(secret, seeded())
    assert float((printed - secret[0]).norm()) > 1, "there is noise"
    torch.testing.assert_close(odd(printed), odd_part[0])  # and yet the odd part is there to the last digit

    sound = perturb(secret[0], sensitivity=MAX_NORM, noise_multiplier=SIGMA, noise=seeded())
    assert float((odd(sound) - odd_part[0]).norm()) > 1


@pytest.mark.parametrize(
    "filter", [LowPassFilter(0.0), LowPassFilter(0.5), LowPassFilter(0.8), PaperBandFilter(0.7)], ids=repr
)
def test_proposition_1_measured(filter):
    """Each output sample has variance K/N σ²S², K counted in real degrees of freedom."""
    n, runs = 32, 20_000
    out = perturb(
        torch.zeros(runs, n),
        sensitivity=2.0,
        noise_multiplier=1.5,
        filter=filter,
        batch_dims=1,
        noise=seeded(),
    )
    predicted = filter.gains(get_transform("fourier"), n).noise_variance * 9
    torch.testing.assert_close(out.var(0), torch.full((n,), predicted), rtol=6 * math.sqrt(2 / runs), atol=0)


@pytest.mark.parametrize("transform", ["fourier", "dct"])
@pytest.mark.parametrize("region", ["box", "lowest"])
def test_corollary_1_measured(transform, region):
    n, runs = 8, 20_000
    filter = LowPassFilter(0.6, region=region)
    out = perturb(
        torch.zeros(runs, n, n),
        sensitivity=1.0,
        noise_multiplier=1.0,
        filter=filter,
        transform=transform,
        dims=(-2, -1),
        batch_dims=1,
        noise=seeded(),
    )
    gains = filter.gains(get_transform(transform), (n, n))
    assert float(out.var(0).mean()) == pytest.approx(gains.noise_variance, rel=0.02)
    if transform == "fourier":  # the same variance at every pixel
        assert float(out.var(0).std() / out.var(0).mean()) < 3 * math.sqrt(2 / runs)
    if region == "box":
        side = int(gains.kept.any(0).sum())
        assert gains.noise_variance == pytest.approx(side**2 / n**2)


def test_filter_before_clip_loses_less_signal():
    """Same noise, same privacy: the paper's order lets coordinates that are dropped anyway use up the bound."""
    query = torch.cat([torch.ones(16), torch.randn(48) * 3])
    recovered = {
        order: perturb(
            query,
            sensitivity=2.0,
            noise_multiplier=1.0,
            filter=LowPassFilter(0.5, order=order),
            transform="identity",
            noise=noise_off(),
        )[:16].norm()
        for order in ("filter_then_clip", "clip_then_filter")
    }
    assert recovered["filter_then_clip"] > recovered["clip_then_filter"]


class TestFrontDoor:
    def test_batch_of_queries_equals_one_at_a_time(self):
        queries = torch.randn(2, 3, 5, 6) * 10
        kwargs = {"sensitivity": 1.0, "noise_multiplier": 1.0, "filter_ratio": 0.3, "dims": (-2, -1)}
        together = perturb(queries, batch_dims=2, noise=noise_off(), **kwargs)
        alone = [perturb(q, noise=noise_off(), **kwargs) for q in queries.flatten(0, 1)]
        torch.testing.assert_close(together, torch.stack(alone).view_as(queries))

    def test_sum_of_one_equals_the_query(self):
        query = torch.randn(3, 16)
        as_query = perturb(query, sensitivity=1.0, noise_multiplier=2.0, filter_ratio=0.5, noise=seeded())
        as_sum = perturb_sum(query[None], max_norm=1.0, noise_multiplier=2.0, filter_ratio=0.5, noise=seeded())
        torch.testing.assert_close(as_query, as_sum)

    @pytest.mark.parametrize("dims", [0, 1, (0, 1), (2, 0), (-1, -3)])
    def test_any_dims(self, dims):
        query = torch.randn(4, 8, 16)
        out = perturb(query, sensitivity=100.0, noise_multiplier=1.0, dims=dims, noise=noise_off())
        torch.testing.assert_close(out, query)

    def test_an_orthonormal_transform_without_filter_is_the_plain_gaussian_mechanism(self):
        """At ρ = 0 clipping in the spectrum is clipping the signal."""
        query = torch.randn(64) * 5
        spectral = perturb(query, sensitivity=1.0, noise_multiplier=1.0, noise=noise_off())
        torch.testing.assert_close(spectral, query / query.norm(), rtol=1e-4, atol=1e-6)

    def test_dtype_shape_and_input_are_kept(self):
        for dtype in (torch.float32, torch.float64):
            query = torch.randn(3, 8, dtype=dtype)
            before = query.clone()
            out = perturb(query, sensitivity=1.0, noise_multiplier=1.0, filter_ratio=0.5)
            assert (out.dtype, out.shape) == (query.dtype, query.shape)
            assert torch.equal(query, before)

    def test_a_non_finite_query_releases_noise_alone_and_says_so(self):
        query = torch.zeros(2, 8)
        query[1, 3] = math.nan
        with pytest.warns(NonFiniteWarning, match="some contributions"):
            out = perturb(query, sensitivity=1.0, noise_multiplier=1.0, batch_dims=1, noise=seeded())
        clean = perturb(torch.zeros(2, 8), sensitivity=1.0, noise_multiplier=1.0, batch_dims=1, noise=seeded())
        torch.testing.assert_close(out, clean)

    def test_no_noise_is_allowed_but_not_in_silence(self):
        with pytest.warns(RuntimeWarning, match="not private"):
            perturb(torch.zeros(8), sensitivity=1.0, noise_multiplier=0.0)

    def test_empty_batch_of_queries(self):
        out = perturb(torch.zeros(0, 8), sensitivity=1.0, noise_multiplier=1.0, batch_dims=1)
        assert out.shape == (0, 8)

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
    def test_bad_bounds(self, bad):
        with pytest.raises(ValueError, match="sensitivity must be finite and positive"):
            perturb(torch.zeros(8), sensitivity=bad, noise_multiplier=1.0)
        with pytest.raises(ValueError, match="max_norm must be finite and positive"):
            perturb_sum(torch.zeros(1, 8), max_norm=bad, noise_multiplier=1.0)
        with pytest.raises(ValueError, match="divisor must be finite and positive"):
            perturb_sum(torch.zeros(1, 8), max_norm=1.0, noise_multiplier=1.0, divisor=bad)

    @pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
    def test_bad_noise_multiplier(self, bad):
        with pytest.raises(ValueError, match="noise_multiplier must be finite"):
            perturb(torch.zeros(8), sensitivity=1.0, noise_multiplier=bad)

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
    @pytest.mark.parametrize("sigma", [0.0, 1.0])
    def test_noise_on_numbers_that_are_not_real_is_refused(self, dtype, sigma):
        """The imaginary part would be released as it is, or with the other half of the noise only."""
        with pytest.raises(TypeError, match=r"view_as_real\(x\) or x\.float\(\)"):
            add_noise(Clipped(torch.zeros(3, dtype=dtype), max_norm=1.0), sigma, seeded())

    def test_other_bad_input_is_explained(self):
        kwargs = {"sensitivity": 1.0, "noise_multiplier": 1.0}
        with pytest.raises(ValueError, match="not both"):
            perturb(torch.zeros(8), filter_ratio=0.5, filter=LowPassFilter(0.2), **kwargs)
        with pytest.raises(ValueError, match="batch_dims"):
            perturb(torch.zeros(8), batch_dims=1, **kwargs)
        with pytest.raises(ValueError, match="cannot transform dimension 0"):
            perturb(torch.zeros(2, 8), batch_dims=1, dims=0, **kwargs)
        with pytest.raises(ValueError, match="cannot transform dimension 3"):
            perturb(torch.zeros(2, 8), dims=3, **kwargs)
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            perturb(torch.zeros(8), filter_ratio=1.0, **kwargs)
        with pytest.raises(TypeError, match="float32 or float64"):
            perturb(torch.zeros(8, dtype=torch.int64), **kwargs)
