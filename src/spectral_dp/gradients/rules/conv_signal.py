"""The rule of convolutions with signal support: Algorithm 2 of the paper (Spectral-DP in a 2-D convolutional layer).

    x   (B, Ci, *N)   padded input, N its size   dA  (B, Co, ...)   spread by the stride, padded with zeros to N
    A, X              their orthonormal DFTs     z_b (Co, Ci/groups, M) real coordinates of G_b

The circular correlation of ``dA`` with ``x`` is the gradient at *all* lags,
``G_b(f) = sqrt|N| conj(A_b(f)) X_b(f)``. It has rank one at each frequency, so with ``w_f`` the number of frequencies
that ``f`` stands for (itself and its mirror image)

    ||z_b||² = |N| sum_f w_f a_f² (sum_i |A_i(f)|²) (sum_j |X_j(f)|²)

and the clipped sum is one complex matrix product for each *kept* frequency. The gradient of the kernel is the inverse
transform, cropped to the lags of the kernel. The norm that is clipped is that of all lags, which is larger than that of
the kernel's gradient. This is the paper's layout, for comparison. Kernel support (``conv.py``) clips less.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.gradients.norms import outer_norms, squares, transform_error
from spectral_dp.gradients.rules.conv_norms import explicitly_padded, padded_size
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.rule import WeightAndBiasRule
from spectral_dp.mechanism.transforms import Fourier


class SignalConvRule(WeightAndBiasRule[nn.Conv1d | nn.Conv2d]):
    """The rule of ``nn.Conv1d`` and ``nn.Conv2d`` with the paper's support, for the Fourier transform only.

    The size of the spectrum is that of the padded input. It is taken from the ``input_layout`` ``(C, H, W)`` of the
    :class:`LayerConfig`, or else from the first input, and does not change later.
    """

    default_transform = "fourier"

    def __init__(self, module: nn.Conv1d | nn.Conv2d, config: LayerConfig) -> None:
        self._size: tuple[int, ...] | None = None
        self._step = 0
        layout = config.input_layout
        if layout is not None:
            if len(layout) != len(module.kernel_size) + 1 or layout[0] != module.in_channels:
                raise ValueError(f"input layout {layout} does not fit {module}: give (channels, *spatial size)")
            self._size = padded_size(module, layout[1:])
        if config.transform not in (None, "fourier"):
            raise ValueError(f"signal support is defined on the Fourier spectrum, not on {config.transform!r}")
        super().__init__(module, config)

    def begin_step(self, step: int) -> None:
        self._step = step
        if self._size is not None:
            gains = self.config.filter.gains(self.transform, self._size, step)
            self._filter_by(gains)
            self._kept = _Frequencies(self._size, gains.kept, gains.pre)
            self._counted = _Frequencies(self._size, gains.pre > 0, gains.pre) if gains.clips_dropped else self._kept

    def coordinate_shape(self) -> tuple[int, ...]:
        if self._size is None:
            raise RuntimeError(
                "the spectrum of a convolution with signal support has the size of its padded input, which is not "
                "known yet: give input_layout=(channels, height, width), or run a forward and backward pass first"
            )
        return self._size

    def coefficient_shape(self, name: str) -> tuple[int, ...]:
        self.coordinate_shape()
        return super().coefficient_shape(name)

    def weight_norms(self, x: Tensor, dA: Tensor) -> Tensor:
        planes = self._planes(x, dA)
        spectra = self._spectra(planes, counted=True)
        X, A = (self._lengths(*each) for each in zip(spectra, planes, strict=True))
        n, m = (2 * spectrum.shape[-1] for spectrum in spectra)  # real and imaginary parts are squared
        power = outer_norms(X, A, n, m).double().square().sum(-1)  # over groups: (F, B)
        return self._counted.weight.to(power) @ power

    def weight_sum(self, x: Tensor, dA: Tensor, c: Tensor) -> Tensor:
        if not len(dA):
            self._fix_size(padded_size(self.module, x.shape[2:]))
            return dA.new_zeros(self.coefficient_shape("weight"), dtype=self.dtype)
        X, A = self._spectra(self._planes(x, dA), counted=False)
        weighted = A.conj() * c.to(X.real.dtype).view(-1, 1, 1)
        G = weighted.permute(0, 2, 3, 1) @ X.permute(0, 2, 1, 3)  # (F, groups, Cog, Cig)
        return self._kept.real_coordinates(G.flatten(1, 2).movedim(0, -1))

    def form_weight(self, x: Tensor, dA: Tensor) -> Tensor:
        X, A = self._spectra(self._planes(x, dA), counted=True)
        G = A.conj()[..., :, None] * X[..., None, :]  # (F, B, groups, Cog, Cig)
        return self._counted.real_coordinates(G.flatten(2, 3).movedim(0, -1))

    def gradient(self, name: str, coefficients: Tensor) -> Tensor:
        if name != "weight":
            return coefficients
        assert self.projection is not None  # without a size there are no coefficients
        lags = self.projection.synthesise(coefficients)
        for dim, (taps, dilation) in enumerate(zip(self.module.kernel_size, self.module.dilation, strict=True), 2):
            lags = lags.index_select(dim, torch.arange(taps, device=lags.device) * dilation)
        return lags

    def _planes(self, x: Tensor, dA: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the padded input times ``sqrt|N|``, and ``dA`` spread by the stride: ``(B, groups, C, *N)``."""
        module, dtype = self.module, self.dtype
        x, padding = explicitly_padded(module, x.to(dtype))
        x = F.pad(x, [p for n in reversed(padding) for p in (n, n)])
        size = tuple(x.shape[2:])
        self._fix_size(size)
        spread = dA.new_zeros(*dA.shape[:2], *size, dtype=dtype)
        positions = tuple(slice(0, (n - 1) * s + 1, s) for n, s in zip(dA.shape[2:], module.stride, strict=True))
        spread[(slice(None), slice(None), *positions)] = dA.to(dtype)
        x = x * math.sqrt(math.prod(size))
        return x.unflatten(1, (module.groups, -1)), spread.unflatten(1, (module.groups, -1))

    def _spectra(self, planes: tuple[Tensor, Tensor], *, counted: bool) -> tuple[Tensor, Tensor]:
        """Returns ``X (F, B, groups, Cig)`` and ``A (F, B, groups, Cog)``."""
        at = self._counted if counted else self._kept
        X, A = (at.pick(plane) for plane in planes)
        return X, A

    def _lengths(self, spectrum: Tensor, plane: Tensor) -> Tensor:
        """Returns ``||X(f)||`` over channels, ``(F, B, groups)``, plus a bound on its rounding error.

        If all power of a sample is in dropped frequencies, the kept ones are rounding errors of the transform.
        """
        error = transform_error(math.prod(self.coordinate_shape()), plane.dtype)
        return squares(spectrum).sum(-1).sqrt() + error * torch.linalg.vector_norm(plane.flatten(2), dim=2)

    def _fix_size(self, size: tuple[int, ...]) -> None:
        if self._size is None:
            self._size = size
            self.begin_step(self._step)
        if size != self._size:
            raise ValueError(
                f"signal support needs inputs of one size: the padded input was {self._size} and is now {size}. Crop "
                "or pad the data, or use support='kernel', which does not depend on it"
            )


class _Frequencies:
    """Maps chosen real Fourier coordinates to frequencies of the half spectrum of ``torch.fft.rfftn``.

    Attributes:
        weight: ``w_f a_f²`` of each frequency, ``(F,)``.
    """

    def __init__(self, size: tuple[int, ...], chosen: Tensor, pre: Tensor) -> None:
        fourier = Fourier()
        f = fourier.frequencies(size)[chosen] % torch.tensor(size)
        self._unique, which = torch.unique(f, dim=0, return_inverse=True)
        self._which, self._is_imaginary = which, fourier.is_imaginary(size)[chosen]
        self_conjugate = ((2 * self._unique) % torch.tensor(size) == 0).all(1)
        multiplicity = torch.where(self_conjugate, 1.0, 2.0).double()
        gain = pre[chosen].double()
        shared = torch.zeros(len(self._unique), dtype=torch.float64)
        shared[which] = gain  # sine and cosine must have the same gain
        expected = torch.bincount(which, minlength=len(self._unique))
        if bool((shared[which] != gain).any()) or bool((expected != multiplicity).any()):
            raise ValueError(
                "signal support needs filters that treat the sine and cosine of a frequency alike before the clip: "
                "give both the same pre-gain"
            )
        self.weight = multiplicity * shared.square()
        self._factor = multiplicity.sqrt()[which] * gain

    def pick(self, signal: Tensor) -> Tensor:
        """Returns the chosen coefficients of a signal's spectrum, ``(B, groups, C, *N) -> (F, B, groups, C)``."""
        dims = tuple(range(3, signal.ndim))
        spectrum = torch.fft.rfftn(signal, dim=dims, norm="ortho")
        index = self._unique[:, -1]
        if len(dims) == 2:
            index = self._unique[:, 0] * spectrum.shape[-1] + index
        return spectrum.flatten(3).movedim(3, 0)[index.to(signal.device)]

    def real_coordinates(self, G: Tensor) -> Tensor:
        """Returns the real coordinates ``(..., M)`` of complex coefficients ``(..., F)``, times the pre-gains."""
        which, is_imaginary = self._which.to(G.device), self._is_imaginary.to(G.device)
        parts = G[..., which]
        return torch.where(is_imaginary, parts.imag, parts.real) * self._factor.to(G.real)
