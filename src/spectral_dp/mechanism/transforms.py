"""Orthonormal transforms between a real tensor and its real spectral coordinates.

A transform ``T`` is an orthogonal matrix that is applied along one or two dimensions. The privacy argument needs three
properties of it:

- The coordinates are *real* numbers.
- There are as many coordinates as samples of the signal. So the number of coordinates is the number of degrees of
  freedom.
- ``||T x|| = ||x||``. So white Gaussian noise on the coordinates is white Gaussian noise on the signal.

A complex spectrum does not have these properties, because its two Hermitian halves repeat each other. So this module
never returns one.

Along each transformed dimension the coordinates are ordered from the lowest frequency to the highest:

==========  ===================================================================  ===================
name        coordinates                                                          lengths
==========  ===================================================================  ===================
fourier     ``Re F0, √2 Re F1, √2 Im F1, √2 Re F2, ...``, Nyquist last           any
dct         type II, by half-periods                                             any
haar        average, then wavelets from the coarsest scale to the finest         powers of two
hadamard    Walsh functions by sequency (number of sign changes)                 powers of two
identity    the samples themselves, by position                                  any
==========  ===================================================================  ===================

>>> import torch
>>> x = torch.tensor([3.0, 1.0, 3.0, 1.0])
>>> get_transform("fourier").forward(x)  # mean 2 on DC, an oscillation of 1 on Nyquist
tensor([4., 0., 0., 2.])
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

TransformName = Literal["fourier", "dct", "haar", "hadamard", "identity"]


class Transform(ABC):
    """An orthonormal map over one or two dimensions of a real tensor.

    Subclasses implement the fast algorithm. This class chooses between it and one matrix product with the basis, which
    is quicker for short signals (a 3 x 3 kernel or a block of 8). Both are differentiable, and their results agree up
    to rounding errors.
    """

    name: ClassVar[str]
    #: Signals of at most this many samples are transformed by a matrix product. The limit of each transform was
    #: measured by ``benchmarks/bench_transforms.py``.
    matmul_limit: ClassVar[int] = 64

    def forward(self, x: Tensor, dims: int | Sequence[int] = -1) -> Tensor:
        """Returns the coordinates of ``x`` along the dimensions ``dims``, with the shape of ``x``."""
        return self._apply(x, dims, inverse=False)

    def inverse(self, z: Tensor, dims: int | Sequence[int] = -1) -> Tensor:
        """Returns the signal whose coordinates along ``dims`` are ``z``. This is the inverse of :meth:`forward`."""
        return self._apply(z, dims, inverse=True)

    def basis(
        self, shape: int | Sequence[int], *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Returns the orthogonal matrix of the transform, of shape ``(n, n)`` with ``n = prod(shape)``.

        Row ``f`` is the basis signal of coordinate ``f`` (both are flattened), so ``basis @ x == forward(x)``.
        """
        shape = as_tuple(shape)
        self.check_shape(shape)
        return self._matrix(shape, dtype, torch.device(device))

    def _matrix(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return _basis(self, shape, dtype, device)

    @abstractmethod
    def frequencies(self, shape: int | Sequence[int]) -> Tensor:
        """Returns the frequency of every coordinate along every dimension, as integers ``(*shape, len(shape))``.

        Coordinates of equal frequency belong together: a filter either keeps all of them or drops all of them.
        """

    @property
    def frequency_twin(self) -> Transform:
        """A transform with the same frequencies that lives as long as the process, for which results can be cached."""
        return self

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raises ``ValueError`` if signals of this shape cannot be transformed."""
        if not 1 <= len(shape) <= 2:
            raise ValueError(f"transforms act on one or two dimensions, got {len(shape)}: dims of shape {shape}")
        if min(shape) < 1:
            raise ValueError(f"cannot transform an empty dimension: shape {tuple(shape)}")

    @abstractmethod
    def _fast(self, x: Tensor, ndim: int) -> Tensor:
        """Returns the coordinates along the last ``ndim`` dimensions."""

    @abstractmethod
    def _fast_inverse(self, z: Tensor, ndim: int) -> Tensor:
        """Returns the signal, given its coordinates along the last ``ndim`` dimensions."""

    def _apply(self, x: Tensor, dims: int | Sequence[int], *, inverse: bool) -> Tensor:
        dims = as_tuple(dims)
        if x.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"transforms take float32 or float64, got {x.dtype}: convert with x.float() first")
        last = tuple(range(-len(dims), 0))
        x = x.movedim(dims, last)
        shape = x.shape[x.ndim - len(dims) :]
        self.check_shape(shape)
        if x.numel() == 0:  # an empty batch, which some FFT libraries refuse
            return x.clone().movedim(last, dims)
        if math.prod(shape) <= self.matmul_limit:
            basis = self.basis(shape, dtype=x.dtype, device=x.device)
            flat = x.flatten(-len(dims))
            out = (flat @ basis if inverse else flat @ basis.T).unflatten(-1, shape)
        else:
            out = (self._fast_inverse if inverse else self._fast)(x, len(dims))
        return out.movedim(last, dims)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Separable(Transform):
    """A transform in two dimensions that transforms one dimension after the other."""

    def frequencies(self, shape: int | Sequence[int]) -> Tensor:
        shape = as_tuple(shape)
        self.check_shape(shape)
        axes = [self._axis_frequencies(n) for n in shape]
        return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)

    def _axis_frequencies(self, n: int) -> Tensor:
        return torch.arange(n)

    def _fast(self, x: Tensor, ndim: int) -> Tensor:
        return self._line(x) if ndim == 1 else self.forward(self.forward(x, -1), -2)

    def _fast_inverse(self, z: Tensor, ndim: int) -> Tensor:
        return self._line_inverse(z) if ndim == 1 else self.inverse(self.inverse(z, -1), -2)

    @abstractmethod
    def _line(self, x: Tensor) -> Tensor:
        """Returns the coordinates along the last dimension."""

    @abstractmethod
    def _line_inverse(self, z: Tensor) -> Tensor:
        """Returns the signal, given its coordinates along the last dimension."""


class Fourier(Transform):
    """The discrete Fourier transform of a real signal, as independent real coordinates.

    Let ``F`` be the orthonormal DFT of a real signal. Then ``F(-f) = conj F(f)``. So each pair of mirrored frequencies
    holds two real numbers, ``√2 Re F`` and ``√2 Im F``. A self-conjugate frequency (DC, Nyquist) holds one.

    In two dimensions, the columns are ordered like the one-dimensional coordinates of the last axis. In a column of
    interior frequency ``c``, the rows are ``F(0, c), F(1, c), F(-1, c), F(2, c), ...``, which are all independent. A
    self-conjugate column is itself the spectrum of a real signal, and its rows are ordered like one.
    """

    name = "fourier"

    def frequencies(self, shape: int | Sequence[int]) -> Tensor:
        """Returns the frequencies of each coordinate.

        In two dimensions, the frequency of the first axis is signed where the sign distinguishes two waves.
        """
        shape = as_tuple(shape)
        self.check_shape(shape)
        columns = _real_frequencies(shape[-1])
        if len(shape) == 1:
            return columns[:, None]
        height, width = shape
        self_conjugate = (2 * columns) % width == 0
        rows = torch.where(self_conjugate, _real_frequencies(height)[:, None], _signed_order(height)[:, None])
        return torch.stack([rows, columns.expand(height, width)], dim=-1)

    def is_imaginary(self, shape: int | Sequence[int]) -> Tensor:
        """Returns booleans of this shape: true for imaginary parts, and false for real parts."""
        shape = as_tuple(shape)
        column = torch.arange(shape[-1]).expand(shape)
        along = torch.arange(shape[0])[:, None].expand(shape) if len(shape) == 2 else torch.zeros(shape)
        self_conjugate = (2 * _real_frequencies(shape[-1])) % shape[-1] == 0
        position = torch.where(self_conjugate, along, column)
        return (position > 0) & (position % 2 == 0)

    def _fast(self, x: Tensor, ndim: int) -> Tensor:
        if ndim == 1:
            return _to_real(torch.fft.rfft(x, norm="ortho"), x.shape[-1])
        height, width = x.shape[-2:]
        spectrum = torch.fft.rfft2(x, norm="ortho")
        half = spectrum.narrow(-2, 0, height // 2 + 1)  # a self-conjugate column is determined by these rows

        def self_conjugate_column(c: int) -> Tensor:
            return _to_real(half[..., c], height)[..., None]

        interior = spectrum[..., _signed_order(height).to(x.device), 1 : (width + 1) // 2] * math.sqrt(2)
        columns = [self_conjugate_column(0), torch.view_as_real(interior).flatten(-2)]
        if width % 2 == 0:
            columns.append(self_conjugate_column(width // 2))
        return torch.cat(columns, dim=-1)

    def _fast_inverse(self, z: Tensor, ndim: int) -> Tensor:
        if ndim == 1:
            return torch.fft.irfft(_to_complex(z), n=z.shape[-1], norm="ortho")
        height, width = z.shape[-2:]

        def self_conjugate_column(c: int) -> Tensor:
            half = _to_complex(z[..., c])
            mirror = half[..., 1 : (height + 1) // 2].flip(-1).conj()
            return torch.cat([half, mirror], dim=-1)[..., None]

        pairs = z[..., 1 : 2 * ((width + 1) // 2) - 1].unflatten(-1, (-1, 2))
        rows = torch.argsort(_signed_order(height) % height).to(z.device)  # back to 0, 1, ..., H-1
        interior = torch.complex(pairs[..., 0], pairs[..., 1])[..., rows, :] / math.sqrt(2)
        columns = [self_conjugate_column(0), interior]
        if width % 2 == 0:
            columns.append(self_conjugate_column(width - 1))
        return torch.fft.irfft2(torch.cat(columns, dim=-1), s=(height, width), norm="ortho")


class DCT(_Separable):
    """The type-II cosine transform: a Fourier transform of the signal mirrored at its ends, so without a jump there."""

    name = "dct"
    matmul_limit = 256

    def _line(self, x: Tensor) -> Tensor:
        # Makhoul 1980: the DFT of the even samples followed by the odd ones backwards, shifted by a quarter sample.
        n = x.shape[-1]
        folded = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], dim=-1)
        w = torch.fft.rfft(folded, norm="ortho") * self._turn(n, x)
        # The real part of w_k is coordinate k, and minus its imaginary part is coordinate n - k.
        tail = -w.imag[..., 1 : (n + 1) // 2].flip(-1)
        return torch.cat([w.real[..., :1] / math.sqrt(2), w.real[..., 1:], tail], dim=-1) * math.sqrt(2)

    def _line_inverse(self, z: Tensor) -> Tensor:
        n = z.shape[-1]
        real = z[..., : n // 2 + 1] / math.sqrt(2)
        real = torch.cat([z[..., :1], real[..., 1:]], dim=-1)
        minus_imag = torch.cat([torch.zeros_like(z[..., :1]), z.flip(-1)[..., : n // 2] / math.sqrt(2)], dim=-1)
        w = torch.complex(real, -minus_imag)
        folded = torch.fft.irfft(w * self._turn(n, z).conj(), n=n, norm="ortho")
        half = (n + 1) // 2
        x = torch.empty_like(z)
        x[..., ::2], x[..., 1::2] = folded[..., :half], folded[..., half:].flip(-1)
        return x

    @staticmethod
    def _turn(n: int, like: Tensor) -> Tensor:
        angle = torch.arange(n // 2 + 1, dtype=like.dtype, device=like.device) * (-math.pi / (2 * n))
        return torch.polar(torch.ones_like(angle), angle)


class _PowerOfTwo(_Separable):
    """A transform that halves its signal repeatedly, so it needs lengths that are powers of two."""

    def check_shape(self, shape: Sequence[int]) -> None:
        super().check_shape(shape)
        for n in shape:
            if n & (n - 1):
                below = 1 << (n.bit_length() - 1)
                nearest = below if n - below <= 2 * below - n else 2 * below
                raise ValueError(
                    f"{self.name} needs lengths that are powers of two, got {n} in shape {tuple(shape)}: pad or "
                    f"crop to {nearest}, or use 'dct', which takes any length"
                )


class Haar(_PowerOfTwo):
    """The Haar wavelet transform. The frequency of a wavelet is the number of wavelets of its scale along the axis."""

    name = "haar"
    matmul_limit = 128

    def _axis_frequencies(self, n: int) -> Tensor:
        return torch.tensor([0] + [1 << (i.bit_length() - 1) for i in range(1, n)])

    def _line(self, x: Tensor) -> Tensor:
        details: list[Tensor] = []
        while x.shape[-1] > 1:
            even, odd = x[..., ::2], x[..., 1::2]
            details.append((even - odd) / math.sqrt(2))
            x = (even + odd) / math.sqrt(2)
        return torch.cat([x, *reversed(details)], dim=-1)

    def _line_inverse(self, z: Tensor) -> Tensor:
        x = z[..., :1]
        while x.shape[-1] < z.shape[-1]:
            n = x.shape[-1]
            detail = z[..., n : 2 * n]
            x = torch.stack([x + detail, x - detail], dim=-1).flatten(-2) / math.sqrt(2)
        return x


class Hadamard(_PowerOfTwo):
    """The Walsh-Hadamard transform: square waves ordered by sequency, computed by additions only."""

    name = "hadamard"
    matmul_limit = 256

    def _line(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        return self._butterflies(x)[..., _sequency_order(n).to(x.device)]

    def _line_inverse(self, z: Tensor) -> Tensor:
        n = z.shape[-1]
        return self._butterflies(z[..., torch.argsort(_sequency_order(n)).to(z.device)])

    @staticmethod
    def _butterflies(x: Tensor) -> Tensor:
        n = x.shape[-1]
        width = 1
        while width < n:
            pairs = x.unflatten(-1, (-1, 2, width))
            a, b = pairs[..., 0, :], pairs[..., 1, :]
            x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
            width *= 2
        return x / math.sqrt(n)


class Identity(_Separable):
    """No transform: the coordinates are the samples, and the mechanism is plain DP-SGD."""

    name = "identity"
    matmul_limit = 0

    def _line(self, x: Tensor) -> Tensor:
        return x

    def _line_inverse(self, z: Tensor) -> Tensor:
        return z


_TRANSFORMS: dict[str, Transform] = {t.name: t for t in (Fourier(), DCT(), Haar(), Hadamard(), Identity())}


def get_transform(transform: TransformName | Transform) -> Transform:
    """Returns the transform with this name. If the argument is a transform already, it is returned unchanged."""
    if isinstance(transform, Transform):
        return transform
    if transform not in _TRANSFORMS:
        raise ValueError(f"unknown transform {transform!r}: choose one of {', '.join(map(repr, _TRANSFORMS))}")
    return _TRANSFORMS[transform]


@lru_cache(maxsize=128)
def _basis(transform: Transform, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the basis is cached, and training cannot use inference tensors
        unit_signals = torch.eye(math.prod(shape), dtype=torch.float64).unflatten(-1, shape)
        return transform._fast(unit_signals, len(shape)).flatten(1).T.contiguous().to(device, dtype)


def as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    """Returns a shape, or a list of dimensions, as a tuple. A number stands for a single one."""
    return (value,) if isinstance(value, int) else tuple(value)


def _real_frequencies(n: int) -> Tensor:
    """Returns ``0, 1, 1, 2, 2, ...``: the frequency of each real Fourier coordinate."""
    return (torch.arange(n) + 1) // 2


def _signed_order(n: int) -> Tensor:
    """Returns ``0, 1, -1, 2, -2, ...``: all ``n`` frequencies of a complex DFT, from the lowest to the highest."""
    k = torch.arange(n)
    return torch.where(k % 2 == 1, (k + 1) // 2, -(k // 2))


def _sequency_order(n: int) -> Tensor:
    """Returns where, in the natural order of the butterflies, the Walsh function with 0, 1, 2, ... sign changes is."""
    bits = n.bit_length() - 1
    gray = (i ^ (i >> 1) for i in range(n))
    return torch.tensor([int(f"{g:0{bits}b}"[::-1], 2) if bits else 0 for g in gray])


def _to_real(spectrum: Tensor, n: int) -> Tensor:
    """Returns the ``n`` real coordinates of a real signal, given its half spectrum ``(..., n//2 + 1)``."""
    parts = torch.view_as_real(spectrum.contiguous()).flatten(-2)  # Re0 Im0 Re1 Im1 ...; Im0 (and Im of Nyquist) are 0
    z = torch.cat([parts[..., :1], parts[..., 2 : n + 1]], dim=-1)
    z[..., 1 : n - (n + 1) % 2].mul_(math.sqrt(2))
    return z


def _to_complex(z: Tensor) -> Tensor:
    """Returns the half spectrum, given the real coordinates. This is the inverse of :func:`_to_real`."""
    n = z.shape[-1]
    zero = torch.zeros_like(z[..., :1])
    parts = [z[..., :1], zero, z[..., 1:]] + [zero] * (n % 2 == 0)
    out = torch.cat(parts, dim=-1)
    out[..., 2 : n + n % 2].mul_(math.sqrt(0.5))
    return torch.view_as_complex(out.unflatten(-1, (-1, 2)))
