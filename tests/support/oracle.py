"""The slow, obvious way: a loop over samples with plain autograd in float64, and explicit basis matrices."""

import itertools
import math

import torch
from torch import Tensor, nn

from spectral_dp.gradients import LayerConfig
from spectral_dp.mechanism.transforms import get_transform


def sample_gradients(module: nn.Module, inputs: tuple[Tensor, ...], dA: Tensor) -> dict[str, Tensor]:
    """Gradient of ``<module(x_b), dA_b>`` for each sample alone, by parameter name: ``(B, *shape)``."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows = []
    for b in range(len(dA)):
        out = module(*(x[b : b + 1] for x in inputs))
        rows.append(torch.autograd.grad((out * dA[b : b + 1]).sum(), list(parameters.values()), allow_unused=True))
    return {
        name: torch.stack([torch.zeros_like(p) if row[i] is None else row[i] for row in rows])
        for i, (name, p) in enumerate(parameters.items())
    }


def coordinates(signal: Tensor, shape: tuple[int, ...], spectral: LayerConfig, transform: str) -> tuple[Tensor, Tensor]:
    """Kept coordinates and those that count in the norm, by the basis matrix, of ``(..., *shape)``."""
    t = get_transform(transform)
    gains = spectral.filter.gains(t, shape)
    z = signal.flatten(-len(shape)) @ t.basis(shape).T * gains.pre.double().flatten()
    return z[..., gains.kept.flatten()], z[..., (gains.pre > 0).flatten()]


def correlation_at_all_lags(x: Tensor, dA: Tensor, stride: tuple[int, ...], groups: int) -> Tensor:
    """``R[o, i, lag] = sum_t spread(dA)[o, t] x[i, t + lag]`` for one sample, circular in the padded input's size."""
    size = x.shape[1:]
    spread = torch.zeros(len(dA), *size, dtype=x.dtype)
    spread[(slice(None), *(slice(0, (n - 1) * s + 1, s) for n, s in zip(dA.shape[1:], stride, strict=True)))] = dA
    c_out, c_in = len(dA) // groups, len(x) // groups
    out = torch.zeros(len(dA), c_in, *size, dtype=x.dtype)
    for lag in itertools.product(*map(range, size)):
        shifted = torch.roll(x, tuple(-n for n in lag), tuple(range(1, x.ndim)))
        for o in range(len(dA)):
            group = o // c_out
            channels = shifted[group * c_in : (group + 1) * c_in]
            out[(o, slice(None), *lag)] = (channels * spread[o]).flatten(1).sum(1)
    return out


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if expected.numel() else 0.0


def norm_of(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.reshape(len(g), -1).square().sum(1) for g in gradients.values()]).sum(0)


def size_of(*shapes: tuple[int, ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)
