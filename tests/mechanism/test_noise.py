import copy
import hashlib
import itertools
import math
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats
from tests.support.privacy_checks import noise_law_p_values

from spectral_dp.mechanism import noise as noise_module
from spectral_dp.mechanism.noise import SecureNoise, SeededNoise

ALPHA = 1e-8  # of each statistical property: the false alarms of a test, which looks at a dozen, are below 1e-6

BLOCK = noise_module._BLOCK
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def seeded(seed=0):
    return SeededNoise(seed, reproducibility_over_privacy=True)


@pytest.mark.parametrize("make", [SecureNoise, seeded])
def test_is_standard_normal_and_the_test_has_power(make):
    samples = make().normal((400, 500), dtype=torch.float64)
    assert min(noise_law_p_values(samples, 1.0)) > ALPHA
    assert max(*noise_law_p_values(samples, 2 / 3), *noise_law_p_values(samples, 3 / 2)) < ALPHA


@pytest.mark.parametrize("make", [SecureNoise, seeded])
def test_values_are_uncorrelated_within_and_between_draws(make):
    """A generator restarted for each draw, or the two outputs of Box-Muller mixed up, would show here."""
    source = make()
    a, b = source.normal((100_000,), dtype=torch.float64), source.normal((100_000,), dtype=torch.float64)
    half = len(a) // 2
    for x, y in ((a, b), (a[:half], a[half:]), (a[1:], a[:-1]), (a.square(), b.square())):
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 6 / math.sqrt(half)


@pytest.mark.parametrize("make", [SecureNoise, seeded])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (2, 5), (BLOCK,), (BLOCK + 1,), (2, BLOCK)])
def test_any_shape(make, shape):
    out = make().normal(shape, dtype=torch.float64)
    assert out.shape == shape
    assert bool(out.isfinite().all())
    assert out.unique().numel() == out.numel()


def test_secure_sources_never_repeat_each_other():
    source = SecureNoise()
    source.normal((1,))  # now there is a reserve
    others = [source, SecureNoise(), copy.deepcopy(source), copy.copy(source), pickle.loads(pickle.dumps(source))]
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
    for count in (100, BLOCK + 1):
        children = [drawn_in_a_fork(source, count) for _ in range(2)]
        drawn = torch.cat([*children, source.normal((count,), dtype=torch.float64)])
        assert len(drawn.unique()) == len(drawn)
        assert not torch.isin(torch.cat(source._reserves), drawn).any()


@pytest.mark.parametrize("number", [os.getpid, lambda: 1])  # in a container of its own, a child has its parent's
def test_a_forked_process_draws_other_noise(monkeypatch, number):
    """A child that hands out what the parent drew, or draws under a key of the parent, would repeat its noise."""
    monkeypatch.setattr(os, "getpid", number)
    check_forks_draw_other_noise(SecureNoise())


def test_control_a_source_that_does_not_look_for_a_fork_is_caught(monkeypatch):
    source = SecureNoise()
    monkeypatch.setattr(noise_module, "this_process", lambda: source._process)
    with pytest.raises(AssertionError):
        check_forks_draw_other_noise(source)


class Reserve:
    """Values of which some are taken, with something that happens in the meantime."""

    def __init__(self, values, meantime):
        self.values, self.meantime = values, meantime

    def __len__(self):
        self.meantime()
        return len(self.values)

    def split(self, sizes):
        taken, rest = self.values.split(sizes)
        return taken, Reserve(rest, self.meantime)


def test_threads_may_notice_a_fork_one_after_the_other():
    """The second one forgets what the first one has drawn in the meantime, and must not spoil what it is taking."""
    source = SecureNoise()
    values = torch.randn(100, dtype=torch.float64)
    source._reserves = [Reserve(values, source._forget)]
    assert torch.equal(source.normal((60,), dtype=torch.float64), values[:60])
    assert not torch.isin(source.normal((60,), dtype=torch.float64), values[:60]).any()


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
    sizes = [1, 7, BLOCK, 3, BLOCK + 1, *[BLOCK // 3] * 9, BLOCK - 1]
    drawn = [source.normal((size,), dtype=torch.float64) for size in sizes]
    assert [len(values) for values in drawn] == sizes
    everything = torch.cat(drawn)
    assert len(everything.unique()) == len(everything)


def test_small_draws_share_a_reserve_and_never_a_value():
    check_no_value_comes_twice(SecureNoise())


def drawn_by_threads(source, times=300):
    with ThreadPoolExecutor(8) as pool:
        return torch.cat(list(pool.map(lambda _: source.normal((500,), dtype=torch.float64), range(times))))


def test_threads_that_share_a_source_share_no_value():
    drawn = drawn_by_threads(SecureNoise())
    assert len(drawn.unique()) == len(drawn)


def test_control_threads_that_look_before_they_take_share_values():
    class Looking(SecureNoise):
        def _take(self, count):
            reserve = self._reserves[0]
            taken, rest = reserve.split([count, len(reserve) - count])
            self._reserves = [rest]
            return taken

    source = Looking()
    source._reserves = [Reserve(torch.randn(1 << 19, dtype=torch.float64), lambda: time.sleep(1e-3))]
    drawn = drawn_by_threads(source, 40)
    assert len(drawn.unique()) < len(drawn)


def test_control_a_reserve_that_is_not_used_up_is_caught():
    class Repeating(SecureNoise):
        def normal(self, shape, **options):
            reserves, values = list(self._reserves), super().normal(shape, **options)
            self._reserves = reserves or self._reserves
            return values

    with pytest.raises(AssertionError):
        check_no_value_comes_twice(Repeating())


@pytest.fixture(params=["numpy", "torch"])
def pairs(request, monkeypatch):
    """Makes pairs of normals from random bytes, by the functions of NumPy or of torch."""
    monkeypatch.setattr(noise_module, "_ELEMENTARY", {"numpy": np, "torch": torch}[request.param])

    def make(radius, angle):
        n = len(radius)
        bits, out = torch.from_numpy(np.stack([radius, angle])), torch.full((2 * n,), math.nan, dtype=torch.float64)
        noise_module._box_muller(bits, [torch.full((n,), math.nan, dtype=torch.float64) for _ in range(3)], out)
        return out.view(2, n)

    return make


def random_integers(n):
    return np.frombuffer(os.urandom(16 * n), np.int64).copy().reshape(2, n)


EXACT = 1e-12  # how far values may be from those of the textbook, for fixed bits: a radius r is exact to 1e-16 / r


def box_muller(radius, angle):
    """The formulas of the textbook, with sine and cosine."""
    r = np.sqrt(-2 * np.log(np.abs(radius.astype(np.float64) + 0.5) * 2.0**-63))
    phi = (angle.astype(np.float64) + 0.5) * (math.pi * 2.0**-63)
    return r * np.sin(phi), r * np.cos(phi)


def test_pairs_are_those_of_box_muller(pairs):
    """Sine and cosine from the tangent, and the logarithm and tangent of both libraries, to rounding."""
    bits = np.random.default_rng(0).integers(-(2**63), 2**63, (2, 10_000))
    np.testing.assert_allclose(pairs(*bits).numpy(), box_muller(*bits), rtol=0, atol=EXACT)


def test_no_integer_gives_an_infinite_value(pairs):
    """The logarithm of 0, the tangent of a right angle, and rounding up to 1 are where formulas like this one fail."""
    integers = np.array([-2, -1, 0, 1, 2**63 - 1, 2**63 - 2, 1 - 2**63, -(2**63), 2**62, -(2**62)], dtype=np.int64)
    x, y = pairs(np.repeat(integers, len(integers)), np.tile(integers, len(integers)))
    assert bool(torch.isfinite(x).all() and torch.isfinite(y).all() and (x != 0).all())
    assert torch.hypot(x, y).min().item() > 1e-9


def check_law_of_pairs(x, y):
    """A radius and a uniform angle, independent of each other: a wrong one could leave each value normal by itself.

    So could their later bits: with 32 of them, the pair added to a value lies on one of 2^32 rays, which give it away.
    """
    squared, angle = (x**2 + y**2).numpy(), torch.atan2(x, y).numpy() / (2 * math.pi) % 1
    for uniform in (np.exp(-squared / 2), angle):
        for bits in (0, 20, 40):
            assert stats.kstest(uniform * 2.0**bits % 1, "uniform").pvalue > ALPHA
    assert abs(np.corrcoef(squared, np.cos(8 * math.pi * angle))[0, 1]) < 6 / math.sqrt(len(x))
    for each in (x, y, (x + y) / math.sqrt(2), (x - y) / math.sqrt(2)):
        assert min(noise_law_p_values(each, 1.0)) > ALPHA


def test_law_of_pairs(pairs):
    check_law_of_pairs(*pairs(*random_integers(50_000)))


@pytest.mark.parametrize(
    "broken",
    [
        lambda radius, angle: (radius, angle // 2),  # half of the circle
        lambda radius, angle: (radius, np.abs(angle)),
        lambda radius, angle: (radius // 2, angle),  # too long a radius
        lambda radius, angle: (np.maximum(radius, 0), angle),  # one of two values far too long
        lambda radius, angle: (radius, radius),  # bits used twice
        lambda radius, angle: (radius, angle & -(1 << 60)),  # 4 bits of angle
        lambda radius, angle: (radius, angle & -(1 << 32)),  # 32 bits of angle
        lambda radius, angle: (radius & -(1 << 32), angle),  # 32 bits of radius
    ],
)
def test_control_a_wrong_use_of_the_bits_is_caught(pairs, broken):
    with pytest.raises(AssertionError):
        check_law_of_pairs(*pairs(*broken(*random_integers(50_000))))


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def reference(keys, counts):
    """Returns what a draw must make of its keys: AES of a counter, and the formulas of the textbook.

    Args:
        keys: A key for each thread. The threads take blocks in turn.
        counts: The number of values of each block.
    """
    pairs = (counts[0] + 1) // 2
    parts = []
    for block, count in enumerate(counts):
        turn, thread = divmod(block, len(keys))
        counter = np.zeros((pairs, 2), dtype=">u8")
        counter[:, 1] = turn * pairs + np.arange(pairs)
        bits = Cipher(algorithms.AES(keys[thread]), modes.ECB()).encryptor().update(counter.tobytes())
        x, y = box_muller(*np.frombuffer(bits, np.int64).reshape(2, pairs))
        parts += [x[: count // 2], y[: count - count // 2]]
    return torch.from_numpy(np.concatenate(parts))


def is_rounded(drawn, exact):
    """Whether values are these ones, rounded once to their dtype."""
    limits = torch.finfo(drawn.dtype)
    return torch.allclose(drawn.double(), exact, rtol=limits.eps / 2, atol=EXACT + limits.tiny * limits.eps)


def known_keys(monkeypatch):
    """Makes keys known; returns the list that they are added to."""
    keys = []

    def next_key(count):
        keys.append(hashlib.sha512(bytes([len(keys)])).digest()[:count])
        return keys[-1]

    monkeypatch.setattr(noise_module.os, "urandom", next_key)
    return keys


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "counts",
    [(1,), (BLOCK - 1,), (BLOCK,), (BLOCK, 1), (BLOCK, BLOCK, 3), (*[BLOCK] * 5, BLOCK // 4)],
)
@pytest.mark.usefixtures("three_threads")
def test_every_value_is_the_one_that_its_key_makes(monkeypatch, dtype, counts):
    """Nothing is scaled, left out or taken twice, and no bit comes from elsewhere, in every path and to rounding."""
    keys = known_keys(monkeypatch)
    drawn = SecureNoise().normal((sum(counts),), dtype=dtype)
    assert {len(key) for key in keys} == {32}
    blocks = counts if len(drawn) > BLOCK else (BLOCK,)  # a small draw is the beginning of a block
    orders = itertools.permutations(keys)  # the threads ask for keys in any order
    assert any(is_rounded(drawn, reference(order, blocks)[: len(drawn)]) for order in orders)
    assert drawn.untyped_storage().nbytes() == drawn.nbytes, "who saves these values saves others, too"


def test_requests_take_one_value_after_the_other_also_over_the_end_of_a_draw(monkeypatch):
    """A rest that is given out together with a new draw is neither lost nor given out again."""
    keys, source = known_keys(monkeypatch), SecureNoise()
    counts = [BLOCK - 10, 0, 30, BLOCK // 2, BLOCK, 5]
    drawn = torch.cat([source.normal((count,), dtype=torch.float64) for count in counts])
    blocks = torch.cat([reference([key], (BLOCK,)) for key in keys])
    assert len(keys) == math.ceil(sum(counts) / BLOCK)
    assert is_rounded(drawn, blocks[: len(drawn)])
    assert not is_rounded(drawn[: BLOCK + 20], blocks.roll(-1)[: BLOCK + 20])


@pytest.mark.parametrize("dtype", DTYPES)
def test_control_a_wrong_value_is_caught(dtype):
    exact = torch.randn(100, dtype=torch.float64)
    assert is_rounded(exact.to(dtype), exact)
    scaled = exact * (1 + 2 * torch.finfo(dtype).eps + 1e-11)
    for wrong in (scaled, exact.roll(1), torch.cat([exact[:-1], -exact[-1:]])):
        assert not is_rounded(wrong.to(dtype), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [BLOCK // 4, BLOCK, BLOCK + 2, 3 * BLOCK])
def test_the_tail_reaches_as_far_as_documented(monkeypatch, dtype, count):
    """The bits of the longest radius, at angles that give all of it to one value of the pair and then to the other."""
    tail = math.sqrt(2 * 64 * math.log(2))

    class Longest:
        def update_into(self, data, buffer):
            integers = np.zeros(len(data) // 8, np.int64)
            integers[len(integers) // 2 :: 2] = 2**62
            buffer[:] = integers.view(np.uint8).data
            return len(data)

    monkeypatch.setattr(noise_module.Cipher, "encryptor", lambda self: Longest())
    drawn = SecureNoise().normal((count,), dtype=dtype)
    assert is_rounded(drawn.msort()[-(count // 2) :], torch.full((count // 2,), tail, dtype=torch.float64))


@pytest.mark.parametrize("count", [5, BLOCK + 1])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_a_dtype_without_normal_values_is_refused(dtype, count):
    """Complex values would have no imaginary noise, and whole ones would be cut off."""
    with pytest.raises(TypeError, match="float dtype"):
        SecureNoise().normal((count,), dtype=dtype)


def test_a_negative_shape_is_refused():
    with pytest.raises(RuntimeError, match="-1"):
        SecureNoise().normal((-1,))


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
