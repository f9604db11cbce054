import copy
import math
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from tests.support.privacy_checks import noise_law_p_values

from spectral_dp.mechanism import noise as noise_module
from spectral_dp.mechanism.noise import SecureNoise, SeededNoise

ALPHA = 1e-4  # both sources are tested once per run of each test: one false alarm in thousands of runs


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
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 5), (1 << 17,), ((1 << 17) + 1,), (3 << 17,)])
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


def test_a_forked_process_draws_other_noise():
    """A child that inherits the key would draw the parent's noise again."""
    source = SecureNoise()
    source.normal((1,))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        # Only ciphers and the random device here: torch's threads do not survive a fork.
        source._pid != os.getpid() and source._rekey()
        out = bytearray(32)
        source._stream.update_into(bytes(32), out)
        os.write(write, bytes(out))
        os._exit(0)
    os.waitpid(child, 0)
    out = bytearray(32)
    source._stream.update_into(bytes(32), out)
    assert os.read(read, 32) != bytes(out)


def test_noise_that_is_drawn_in_another_process_is_under_another_key():
    """Catches a source that could draw a new key after a fork, as above, and does not look whether there was one."""
    source = SecureNoise()
    source.normal((3,))
    stream, reserve = source._stream, source._reserve
    assert reserve.numel(), "there are normals left, which the parent will use"
    source._pid += 1  # as fork leaves it: all that is in memory was the parent's
    drawn = source.normal((100,), dtype=torch.float64)
    assert source._stream is not stream
    assert source._pid == os.getpid()
    assert not torch.isin(reserve, torch.cat([drawn, source._reserve])).any()
    same, _ = source._stream, source.normal((3,))
    assert source._stream is same, "one key for one process"


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
    source._rekey()  # what a forked process does, see above
    assert len(source._reserve) == 0


def drawn_by_threads(source):
    with ThreadPoolExecutor(8) as pool:
        return torch.cat(list(pool.map(lambda _: source.normal((500,), dtype=torch.float64), range(800))))


def test_threads_that_share_a_source_share_no_value():
    drawn = drawn_by_threads(SecureNoise())
    assert len(drawn.unique()) == len(drawn)


def test_control_without_a_lock_threads_share_values():
    class Unlocked(SecureNoise):
        def _take(self, count, dtype):
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
