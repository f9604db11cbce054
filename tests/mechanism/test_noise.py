import copy
import math
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import algorithms
from scipy import stats
from tests.support.privacy_checks import noise_law_p_values

from spectral_dp.mechanism import noise as noise_module
from spectral_dp.mechanism.noise import SecureNoise, SeededNoise

ALPHA = 1e-4  # both sources are tested once per run of each test: one false alarm in thousands of runs
PAIR_ALPHA = 1e-6  # pairs of values are tested for ten properties at a time


def seeded(seed=0):
    return SeededNoise(seed, reproducibility_over_privacy=True)


@pytest.mark.parametrize("make", [SecureNoise, seeded])
def test_is_standard_normal_and_the_test_has_power(make):
    samples = make().normal((400, 500), dtype=torch.float64)
    assert min(noise_law_p_values(samples, 1.0)) > ALPHA
    assert noise_law_p_values(samples, 2 / 3)[0] < ALPHA
    assert noise_law_p_values(samples, 3 / 2)[0] < ALPHA
    assert noise_law_p_values(samples, 2 / 3)[1] < ALPHA
    assert noise_law_p_values(samples, 3 / 2)[1] < ALPHA


@pytest.mark.parametrize("make", [SecureNoise, seeded])
def test_values_are_uncorrelated_within_and_between_draws(make):
    """A generator restarted for each draw, or the two outputs of Box-Muller mixed up, would show here."""
    source = make()
    a, b = source.normal((100_000,), dtype=torch.float64), source.normal((100_000,), dtype=torch.float64)
    half = len(a) // 2
    for x, y in ((a, b), (a[:half], a[half:]), (a[1:], a[:-1]), (a.square(), b.square())):
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 5 / math.sqrt(half)


@pytest.mark.parametrize("make", [SecureNoise, seeded])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 5), (1 << 16,), ((1 << 16) + 1,), (5 << 16,)])
def test_any_shape(make, shape):
    out = make().normal(shape, dtype=torch.float64)
    assert out.shape == shape
    assert bool(out.isfinite().all())
    assert out.unique().numel() == out.numel()


@pytest.mark.parametrize("make", [SecureNoise, seeded])
def test_dtype(make):
    for dtype in (torch.float32, torch.float64):
        assert make().normal((3,), dtype=dtype).dtype == dtype


def test_secure_sources_never_repeat_each_other():
    source = SecureNoise()
    others = [
        source,
        SecureNoise(),
        copy.deepcopy(source),
        copy.copy(source),
        pickle.loads(pickle.dumps(source)),
    ]
    draws = torch.stack([s.normal((64,), dtype=torch.float64) for s in others])
    assert draws.unique().numel() == draws.numel()
    assert source.state_dict() == {}, "a key in a checkpoint would let its reader subtract the noise"


def drawn_in_a_fork(source, count):
    """What a forked process draws. One thread: torch's others do not survive a fork."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        torch.set_num_threads(1)
        os.write(write, source.normal((count,), dtype=torch.float64).numpy().tobytes())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        drawn = torch.frombuffer(bytearray(pipe.read()), dtype=torch.float64)
    os.waitpid(child, 0)
    assert len(drawn) == count
    return drawn


def check_forks_draw_other_noise(source):
    source.normal((1,))  # now there is a reserve, which the child inherits
    for count in (100, noise_module._SMALL + 1):
        drawn = torch.cat(
            [*(drawn_in_a_fork(source, count) for _ in range(2)), source.normal((count,), dtype=torch.float64)]
        )
        assert len(drawn.unique()) == len(drawn)
        assert not torch.isin(source._reserve, drawn).any()


def test_a_forked_process_draws_other_noise():
    """A child that hands out what the parent drew, or draws under a key of the parent, would repeat its noise."""
    check_forks_draw_other_noise(SecureNoise())


def test_control_a_source_that_does_not_look_for_a_fork_is_caught(monkeypatch):
    source = SecureNoise()
    monkeypatch.setattr(noise_module.os, "getpid", lambda: source._pid)
    with pytest.raises(AssertionError):
        check_forks_draw_other_noise(source)


def test_a_fork_waits_for_no_lock():
    """The thread that holds the lock does not exist in the child, and would never release it."""
    source = SecureNoise()
    with source._one_at_a_time:
        assert len(drawn_in_a_fork(source, 10)) == 10


def test_a_seed_must_be_asked_for_in_so_many_words():
    with pytest.raises(ValueError, match="reproducibility_over_privacy=True"):
        SeededNoise(0)
    assert not seeded().is_private
    assert SecureNoise().is_private


def test_seeded_noise_reproduces_and_resumes():
    torch.testing.assert_close(seeded(3).normal((9,)), seeded(3).normal((9,)), rtol=0, atol=0)
    assert not torch.equal(seeded(3).normal((9,)), seeded(4).normal((9,)))
    source, resumed = seeded(3), seeded(99)
    source.normal((5,))
    resumed.load_state_dict(source.state_dict())
    torch.testing.assert_close(source.normal((9,)), resumed.normal((9,)), rtol=0, atol=0)


def test_a_foreign_state_is_refused():
    with pytest.raises(ValueError, match="SeededNoise"):
        seeded().load_state_dict({})
    with pytest.raises(ValueError, match="no state"):
        SecureNoise().load_state_dict(seeded().state_dict())


def check_no_value_comes_twice(source):
    """A value handed out twice could be subtracted by whoever sees both releases."""
    small = noise_module._SMALL
    sizes = [1, 7, small, 3, small + 1, *[small - 1] * 20]
    drawn = [source.normal((size,), dtype=torch.float64) for size in sizes]
    assert [len(values) for values in drawn] == sizes
    everything = torch.cat(drawn)
    assert len(everything.unique()) == len(everything)


def test_small_draws_share_a_reserve_and_never_a_value():
    check_no_value_comes_twice(source := SecureNoise())
    source.normal((1,)).fill_(0)  # what was handed out is the caller's, not a window into the reserve
    assert bool((source.normal((100,), dtype=torch.float64) != 0).all())


def drawn_by_threads(source):
    with ThreadPoolExecutor(8) as pool:
        return torch.cat(list(pool.map(lambda _: source.normal((500,), dtype=torch.float64), range(800))))


def test_threads_that_share_a_source_share_no_value():
    drawn = drawn_by_threads(SecureNoise())
    assert len(drawn.unique()) == len(drawn)


def test_control_without_a_lock_threads_share_values():
    class Unlocked(SecureNoise):
        def _take(self, count):
            reserve = self._reserve
            time.sleep(1e-5)  # another thread's turn
            self._reserve = reserve[count:]
            return reserve[:count]

    source = Unlocked()
    source._reserve = torch.randn(1 << 19, dtype=torch.float64)
    source._one_at_a_time = nullcontext()
    drawn = drawn_by_threads(source)
    assert len(drawn.unique()) < len(drawn)


def test_control_a_reserve_that_is_not_used_up_is_caught():
    class Repeating(SecureNoise):
        def normal(self, shape, **options):
            reserve, values = self._reserve, super().normal(shape, **options)
            self._reserve = reserve if len(reserve) else self._reserve
            return values

    with pytest.raises(AssertionError):
        check_no_value_comes_twice(Repeating())


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda source: pickle.loads(pickle.dumps(source))])
def test_the_reserve_is_not_copied(clone):
    source = SecureNoise()
    source.normal((1,))  # fills it
    assert not torch.equal(clone(source).normal((100,)), source.normal((100,)))


@pytest.fixture(params=["numpy", "torch"])
def pairs(request, monkeypatch):
    """Makes pairs of normals from random bytes, by the functions of NumPy or of torch."""
    monkeypatch.setattr(noise_module, "_ELEMENTARY", {"numpy": np, "torch": torch}[request.param])

    def make(radius, angle):
        n = len(radius)
        raw = torch.cat([torch.as_tensor(radius).view(torch.uint8), torch.as_tensor(angle).view(torch.uint8)])
        out = torch.full((2 * n,), math.nan, dtype=torch.float64)
        noise_module._box_muller(raw, [torch.full((n,), math.nan, dtype=torch.float64) for _ in range(3)], out)
        return out.view(2, n)

    return make


def random_integers(n):
    radius, angle = np.frombuffer(os.urandom(8 * n), np.int64), np.frombuffer(os.urandom(4 * n), np.int32)
    return radius.copy(), angle.copy()


def test_pairs_are_those_of_box_muller(pairs):
    """Sine and cosine from the tangent, and the logarithm and tangent of both libraries, to rounding."""
    radius, angle = random_integers(10_000)
    u = np.abs(radius.astype(np.float64) + 0.5) * 2.0**-63
    phi = (angle.astype(np.float64) + 0.5) * (math.pi * 2.0**-31)
    r = np.sqrt(-2 * np.log(u))
    x, y = pairs(radius, angle).numpy()
    np.testing.assert_allclose(x, r * np.sin(phi), rtol=0, atol=1e-13)
    np.testing.assert_allclose(y, r * np.cos(phi), rtol=0, atol=1e-13)


def test_no_integer_gives_an_infinite_value_or_none(pairs):
    """The logarithm of 0, the tangent of a right angle, and rounding up to 1 are where formulas like this one fail."""
    near_zero, largest = [-2, -1, 0, 1], 2**63 - 1
    radii = np.array([*near_zero, largest, largest - 1, -largest, -largest - 1, 2**62], dtype=np.int64)
    angles = np.array([-(2**31), 1 - 2**31, -(2**30), -1, 0, 1, 2**30, 2**31 - 1], dtype=np.int32)
    x, y = pairs(np.repeat(radii, len(angles)), np.tile(angles, len(radii)))
    assert bool(torch.isfinite(x).all() and torch.isfinite(y).all())
    assert bool((x != 0).all() and (y != 0).all())
    length = torch.hypot(x, y)
    tail = math.sqrt(2 * 64 * math.log(2))  # as documented
    assert length.max().item() == pytest.approx(tail, rel=1e-12)
    assert length.min().item() > 1e-9


def check_law_of_pairs(x, y):
    """A radius and a uniform angle, independent of each other: a wrong one could leave each value normal by itself."""
    squared, angle = (x**2 + y**2).numpy(), torch.atan2(x, y).numpy() / (2 * math.pi) % 1
    assert stats.kstest(np.exp(-squared / 2), "uniform").pvalue > PAIR_ALPHA
    assert stats.kstest(angle, "uniform").pvalue > PAIR_ALPHA
    assert abs(np.corrcoef(squared, np.cos(8 * math.pi * angle))[0, 1]) < 5 / math.sqrt(len(x))
    both = torch.cat([x, y, (x + y) / math.sqrt(2), (x - y) / math.sqrt(2)])
    assert min(noise_law_p_values(torch.stack([x, y, both[: len(x)]]), 1.0)) > PAIR_ALPHA
    for each in both.view(4, -1):
        assert stats.kstest(each.numpy(), "norm").pvalue > PAIR_ALPHA


def test_law_of_pairs(pairs):
    check_law_of_pairs(*pairs(*random_integers(50_000)))


@pytest.mark.parametrize(
    "broken",
    [
        lambda radius, angle: (radius, angle // 2),  # half of the circle
        lambda radius, angle: (radius, np.abs(angle)),
        lambda radius, angle: (radius // 2, angle),  # too long a radius
        lambda radius, angle: (np.maximum(radius, 0), angle),  # one of two values far too long
        lambda radius, angle: (radius, (radius >> 32).astype(np.int32)),  # bits used twice
        lambda radius, angle: (radius, angle & ~((1 << 28) - 1)),  # 4 bits of angle
    ],
)
def test_control_a_wrong_use_of_the_bits_is_caught(pairs, broken):
    with pytest.raises(AssertionError):
        check_law_of_pairs(*pairs(*broken(*random_integers(50_000))))


def test_both_values_of_a_pair_are_returned_once():
    """A block has the first values of its pairs in one half and the second in the other."""
    drawn = SecureNoise().normal((noise_module._BLOCK,), dtype=torch.float64)
    check_law_of_pairs(*drawn.view(2, -1))


def check_threads_draw_apart():
    blocks = 7
    drawn = noise_module._draw(blocks * noise_module._BLOCK - 1, torch.float64)
    assert len(drawn.unique()) == len(drawn)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_threads_of_a_draw_share_no_value():
    check_threads_draw_apart()


@pytest.mark.usefixtures("three_threads")
def test_control_threads_under_one_key_are_caught(monkeypatch):
    key = os.urandom(32)
    monkeypatch.setattr(noise_module.os, "urandom", lambda n: key[:n])
    with pytest.raises(AssertionError):
        check_threads_draw_apart()


def test_every_draw_has_a_key_of_its_own(monkeypatch):
    keys = []
    monkeypatch.setattr(noise_module.algorithms, "AES", lambda key, aes=algorithms.AES: (keys.append(key), aes(key))[1])
    source = SecureNoise()
    for _ in range(3):
        source.normal((noise_module._SMALL + 1,))
    assert len(set(keys)) == len(keys) == 3
    assert {len(key) for key in keys} == {32}


def test_a_cipher_that_falls_short_is_an_error(monkeypatch):
    """The rest of its buffer would be what the block before left there."""

    class Short:
        def update_into(self, data, buffer):
            return len(data) - 16

    monkeypatch.setattr(noise_module.Cipher, "encryptor", lambda self: Short())
    with pytest.raises(RuntimeError, match="fewer random bytes"):
        SecureNoise().normal((5,))


@pytest.mark.usefixtures("three_threads")
def test_an_error_in_a_thread_is_not_lost(monkeypatch):
    def fails(*args):
        raise OSError("no entropy")

    monkeypatch.setattr(noise_module.os, "urandom", fails)
    with pytest.raises(OSError, match="no entropy"):
        SecureNoise().normal((9 << 16,))


@pytest.mark.usefixtures("three_threads")
def test_noise_under_inference_mode_can_be_used_outside():
    with torch.inference_mode():
        drawn = SecureNoise().normal((9 << 16,))
    assert min(noise_law_p_values(drawn.add_(0).view(9, -1), 1.0)) > ALPHA
