import math

import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectral_dp.mechanism.transforms import get_transform

ANY_LENGTH = ["fourier", "dct", "identity"]
POWER_OF_TWO = ["haar", "hadamard"]


def shapes(name: str):
    side = st.integers(1, 40) if name in ANY_LENGTH else st.sampled_from([1, 2, 4, 8, 16, 32])
    line = st.integers(1, 300) if name in ANY_LENGTH else st.sampled_from([1, 2, 16, 64, 128, 512])
    return st.one_of(st.tuples(line), st.tuples(side, side))


named_shapes = st.sampled_from(ANY_LENGTH + POWER_OF_TWO).flatmap(lambda name: st.tuples(st.just(name), shapes(name)))
last = {1: (-1,), 2: (-2, -1)}


@settings(deadline=None, max_examples=150)
@given(named_shapes, st.integers(0, 2**31))
def test_round_trip_and_parseval(named_shape, seed):
    name, shape = named_shape
    transform = get_transform(name)
    x = torch.randn(2, 3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    z = transform.forward(x, last[len(shape)])
    torch.testing.assert_close(transform.inverse(z, last[len(shape)]), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(z.flatten(2).norm(dim=-1), x.flatten(2).norm(dim=-1), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=80)
@given(named_shapes)
def test_basis_is_orthonormal_and_is_the_transform(named_shape):
    name, shape = named_shape
    if math.prod(shape) > 600:
        shape = shape[:1]
    transform = get_transform(name)
    basis = transform.basis(shape)
    n = math.prod(shape)
    torch.testing.assert_close(basis @ basis.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)
    x = torch.randn(*shape, dtype=torch.float64)
    torch.testing.assert_close(transform.forward(x, last[len(shape)]).flatten(), basis @ x.flatten())


@pytest.mark.parametrize("name", ANY_LENGTH + POWER_OF_TWO)
@pytest.mark.parametrize("shape", [(8,), (4, 8), (16, 16), (512,)])
def test_short_and_long_path_agree(name, shape, monkeypatch):
    """A wrong threshold must never change a value."""
    transform = get_transform(name)
    x = torch.randn(5, *shape, dtype=torch.float64)
    results = []
    for limit in (0, 10**6):
        monkeypatch.setattr(type(transform), "matmul_limit", limit)
        z = transform.forward(x, last[len(shape)])
        results.append((z, transform.inverse(z, last[len(shape)])))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


@given(st.integers(1, 200))
@settings(deadline=None, max_examples=60)
def test_fourier_line_is_the_hermitian_spectrum(n):
    x = torch.randn(n, dtype=torch.float64)
    z, spectrum = get_transform("fourier").forward(x), torch.fft.rfft(x, norm="ortho")
    expected = [spectrum[0].real]
    for f in range(1, (n + 1) // 2):
        expected += [math.sqrt(2) * spectrum[f].real, math.sqrt(2) * spectrum[f].imag]
    if n % 2 == 0 and n > 1:
        expected.append(spectrum[-1].real)
    torch.testing.assert_close(z, torch.stack(expected))


@given(st.integers(1, 12), st.integers(1, 12))
@settings(deadline=None, max_examples=60)
def test_fourier_plane_is_the_hermitian_spectrum(height, width):
    """Each coordinate is ±√2 Re or Im (or Re, if self-conjugate) of the coefficient its frequency names."""
    x = torch.randn(height, width, dtype=torch.float64)
    fourier = get_transform("fourier")
    z, spectrum = fourier.forward(x, (-2, -1)), torch.fft.fft2(x, norm="ortho")
    energy: dict[tuple[int, int], float] = {}
    for value, (r, c) in zip(z.flatten(), fourier.frequencies((height, width)).flatten(0, 1), strict=True):
        key = (int(r) % height, int(c) % width)
        energy[key] = energy.get(key, 0.0) + float(value) ** 2
    seen = torch.zeros(height, width)
    for (r, c), e in energy.items():
        mirror = (-r % height, -c % width)
        multiplicity = 1 if mirror == (r, c) else 2
        assert e == pytest.approx(multiplicity * float(spectrum[r, c].abs() ** 2))
        seen[r, c] += 1
        if mirror != (r, c):
            seen[mirror] += 1
    assert bool((seen == 1).all()), "every coefficient of the full spectrum is represented exactly once"


@given(st.one_of(st.tuples(st.integers(1, 30)), st.tuples(st.integers(1, 12), st.integers(1, 12))))
@settings(deadline=None, max_examples=60)
def test_fourier_says_which_part_of_which_coefficient_a_coordinate_is(shape):
    x = torch.randn(*shape, dtype=torch.float64)
    fourier, dims = get_transform("fourier"), last[len(shape)]
    spectrum, f = torch.fft.fftn(x, norm="ortho"), fourier.frequencies(shape)
    size = torch.tensor(shape)
    coefficient = spectrum[tuple((f % size).unbind(-1))]
    part = torch.where(fourier.is_imaginary(shape), coefficient.imag, coefficient.real)
    multiplicity = torch.where(((2 * f) % size == 0).all(-1), 1.0, math.sqrt(2))
    torch.testing.assert_close(fourier.forward(x, dims), part * multiplicity.double())


@given(st.integers(1, 300))
@settings(deadline=None, max_examples=60)
def test_dct_is_scipys(n):
    x = torch.randn(2, n, dtype=torch.float64)
    expected = scipy.fft.dct(x.numpy(), type=2, norm="ortho")
    torch.testing.assert_close(get_transform("dct").forward(x), torch.from_numpy(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [2, 8, 32, 128])
def test_hadamard_coordinate_k_has_k_sign_changes(n):
    signs = get_transform("hadamard").basis(n).sign()
    assert (signs[:, 1:] != signs[:, :-1]).sum(1).tolist() == list(range(n))


def test_haar_runs_from_coarse_to_fine():
    assert get_transform("haar").frequencies(8).squeeze(-1).tolist() == [0, 1, 2, 2, 4, 4, 4, 4]
    step = torch.tensor([1.0] * 4 + [-1.0] * 4)
    torch.testing.assert_close(get_transform("haar").forward(step), math.sqrt(8) * torch.eye(8)[1])


@pytest.mark.parametrize("name", ANY_LENGTH + POWER_OF_TWO)
def test_coordinates_are_ordered_by_frequency(name):
    f = get_transform(name).frequencies((16, 16)).abs()
    assert bool((f[1:, :, 0] >= f[:-1, :, 0]).all())
    assert bool((f[:, 1:, 1] >= f[:, :-1, 1]).all())


@pytest.mark.parametrize("name", ANY_LENGTH + POWER_OF_TWO)
@pytest.mark.parametrize("dims", [0, 1, -1, (0, 2), (2, 0), (1, 3), (-1, -3)])
def test_any_dims(name, dims):
    transform = get_transform(name)
    x = torch.randn(4, 2, 8, 16, dtype=torch.float64)
    z = transform.forward(x, dims)
    moved = x.movedim(dims, -1 if isinstance(dims, int) else (-2, -1))
    expected = transform.forward(moved, last[1 if isinstance(dims, int) else 2])
    torch.testing.assert_close(z, expected.movedim(-1 if isinstance(dims, int) else (-2, -1), dims))
    torch.testing.assert_close(transform.inverse(z, dims), x)


@pytest.mark.parametrize("name", ANY_LENGTH + POWER_OF_TWO)
@pytest.mark.parametrize("shape", [(4,), (512,), (2, 4), (32, 32)])
def test_differentiable(name, shape):
    transform = get_transform(name)
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(*shape, dtype=torch.float64)
    (transform.forward(x, last[len(shape)]) * weights).sum().backward()
    torch.testing.assert_close(x.grad, transform.inverse(weights, last[len(shape)]))  # T is orthogonal
    z = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    (transform.inverse(z, last[len(shape)]) * weights).sum().backward()
    torch.testing.assert_close(z.grad, transform.forward(weights, last[len(shape)]))


@pytest.mark.parametrize("name", ANY_LENGTH + POWER_OF_TWO)
def test_dtype_is_kept_and_inputs_are_not_changed(name):
    for n in (8, 1024):
        x = torch.randn(3, n)
        before = x.clone()
        z = get_transform(name).forward(x)
        coordinates = z.clone()
        y = get_transform(name).inverse(z)
        assert z.dtype == y.dtype == torch.float32
        torch.testing.assert_close(x, before, rtol=0, atol=0)
        torch.testing.assert_close(z, coordinates, rtol=0, atol=0)


@pytest.mark.parametrize("name", ANY_LENGTH + POWER_OF_TWO)
def test_device_is_kept(name):
    """The meta device runs every shape and device decision without data: a stray CPU tensor would raise."""
    for shape in ((8,), (1024,), (32, 32)):
        x = torch.empty(*shape, device="meta")
        z = get_transform(name).forward(x, last[len(shape)])
        assert z.device.type == "meta"
        assert get_transform(name).inverse(z, last[len(shape)]).shape == x.shape


@pytest.mark.parametrize("name", POWER_OF_TWO)
@pytest.mark.parametrize(("length", "nearest"), [(3, 2), (7, 8), (100, 128), (90, 64)])
def test_unsupported_length_names_the_nearest(name, length, nearest):
    with pytest.raises(ValueError, match=rf"got {length}.* {nearest},"):
        get_transform(name).forward(torch.zeros(length))


def test_bad_input_is_explained():
    with pytest.raises(ValueError, match="'fourier', 'dct', 'haar', 'hadamard', 'identity'"):
        get_transform("wavelet")
    with pytest.raises(TypeError, match=r"x\.float\(\)"):
        get_transform("dct").forward(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TypeError, match="complex64"):
        get_transform("fourier").forward(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="empty"):
        get_transform("dct").forward(torch.zeros(3, 0))
    with pytest.raises(ValueError, match="one or two"):
        get_transform("dct").forward(torch.zeros(2, 2, 2), (0, 1, 2))
