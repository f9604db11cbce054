"""Any other module: its per-sample gradients by running it again, one sample at a time, under ``torch.func``.

Exact for every module that treats samples independently, but slower than a rule of its own and as large as
``B`` times its parameters while it works.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spectral_dp.gradients.rule import Rule, Spectral
from spectral_dp.recorder import Call

_warned: set[type[nn.Module]] = set()


class FallbackRule(Rule[nn.Module]):
    """Rule of a module without one; covers the parameters of its submodules too.

    Its recorded input is a :class:`Call`, and ``dA`` belongs to the module's (first) output tensor. Tensor arguments
    whose first dimension is the batch size are taken to hold one entry a sample: keep what samples share in buffers. A
    module that gives a sample another output alone than in its batch is refused.
    """

    def __init__(self, module: nn.Module, spectral: Spectral) -> None:
        super().__init__(module, spectral)
        if type(module) not in _warned:
            _warned.add(type(module))
            warnings.warn(
                f"no rule for {type(module).__name__}: its per-sample gradients are computed by running it again under "
                "torch.func, which is exact but slower. Register a rule for it (spectral_dp.gradients.register), or "
                "move its own parameters into standard layers",
                stacklevel=2,
            )

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())

    def squared_norms(self, x: Call, dA: Tensor) -> Tensor:
        total = dA.new_zeros(len(dA))
        for g in self.per_sample(x, dA).values():
            total = total + g.flatten(1).square().sum(1)
        return total

    def clipped_sum(self, x: Call, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        return {name: torch.tensordot(c.to(g.dtype), g, dims=1) for name, g in self.per_sample(x, dA).items()}

    def per_sample(self, x: Call, dA: Tensor) -> dict[str, Tensor]:
        trained = {name: p.detach().to(self.dtype) for name, p in self.parameters().items() if p.requires_grad}
        if len(dA) == 0 or not trained:
            return {name: p.new_zeros(0, *p.shape) for name, p in trained.items()}
        batch = len(dA)

        def is_batched(value: Any) -> bool:
            return isinstance(value, Tensor) and value.ndim > 0 and len(value) == batch

        def prepared(value: Tensor) -> Tensor:
            return value.detach().to(self.dtype) if value.is_floating_point() else value

        leaves, structure = tree_flatten((x.args, dict(x.kwargs)))
        batched = [prepared(v) for v in leaves if is_batched(v)]

        def forward(parameters: dict[str, Tensor], values: list[Any]) -> Tensor:
            args, kwargs = tree_unflatten(values, structure)
            output = functional_call(self.module, parameters, args, kwargs)
            return next(t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point())

        def inner_product(parameters: dict[str, Tensor], inputs: list[Tensor], dA_b: Tensor) -> tuple[Tensor, Tensor]:
            remaining = iter(inputs)
            out = forward(parameters, [next(remaining)[None] if is_batched(v) else v for v in leaves])
            if out.shape != (1, *dA_b.shape):
                raise RuntimeError(f"given one sample it returns {tuple(out.shape)}, not {(1, *dA_b.shape)}")
            return (out * dA_b[None]).sum(), out[0]

        try:
            alone = vmap(grad(inner_product, has_aux=True), in_dims=(None, 0, 0))
            gradients, outputs = alone(trained, batched, dA.to(self.dtype))
        except RuntimeError as error:
            name = type(self.module).__name__
            if "random" in str(error):
                raise RuntimeError(
                    f"{name} draws random numbers in its forward pass, so running it again gives another result: move "
                    "its dropout into an nn.Dropout of the model, or set it to zero"
                ) from error
            raise RuntimeError(
                f"torch.func cannot run {name} one sample at a time ({str(error).splitlines()[0]}): build it from "
                "standard layers, or register a rule for it (spectral_dp.gradients.register)"
            ) from error
        remaining = iter(batched)
        together = forward(trained, [next(remaining) if is_batched(v) else v for v in leaves])
        if not _same(outputs, together):
            raise RuntimeError(
                f"{type(self.module).__name__} gives a sample another output alone than in its batch: it mixes them, "
                "or an argument that samples share is as long as the batch and was taken for one entry a sample (keep "
                "it in a buffer)"
            )
        return gradients


def _same(alone: Tensor, together: Tensor) -> bool:
    """Whether two ways to compute the same outputs agree to rounding, where they are finite."""
    finite = alone.isfinite() & together.isfinite()
    difference = (alone - together).where(finite, torch.zeros_like(alone)).abs().max()
    return bool(difference <= 1e-3 * together.where(finite, torch.zeros_like(together)).abs().max())
