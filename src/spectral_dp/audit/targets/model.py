"""Models as targets: chosen gradients through a library's real training step.

A record is a tuple of :class:`~.excitations.Excitation`: what one sample puts into which layers. A
batch of them is a batch of indices drawn by the library's own data loader; each layer that a record touches is called
once, with a row for every sample of the batch (zeros where a sample does not touch it), and one backward pass follows.
Recording, physical splits, clipping, noise, filter, inverse and divisor are the library's.
"""

from __future__ import annotations

import copy
import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spectral_dp.audit.targets.excitations import Excitation, LayerProbe, Seen
from spectral_dp.audit.targets.target import BEYOND, LONG, SHORT, Block, Claim, Hostile, Record, Target


class ModelTarget(Target):
    """The training step of a model: what our library and Opacus have in common.

    Args:
        model: The model. A copy of it is audited.
        claim: The claim that is made of its training.
        input_shape: The shape of one sample, which is then random numbers.
        example: One sample, for models whose inputs are no random numbers, such as token indices.
    """

    #: Whether every layer must see every batch.
    _calls_every_layer = False

    def __init__(
        self,
        model: nn.Module,
        claim: Claim,
        *,
        input_shape: Sequence[int] | None = None,
        example: Tensor | None = None,
    ) -> None:
        if (input_shape is None) == (example is None):
            raise ValueError("give either input_shape or example")
        self.claim = claim
        self._template = copy.deepcopy(model)
        for module in self._template.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0  # randomness of the gradients, not of the release
        generator = torch.Generator().manual_seed(0)
        self._example = torch.randn(tuple(input_shape or ()), generator=generator) if example is None else example
        self._seen = _trace(self._template, self._example)

    @property
    @abstractmethod
    def _probes(self) -> list[LayerProbe]:
        """The layers that are trained, in the order of the release."""

    def blocks(self, most: int, generator: torch.Generator) -> list[Block]:
        """Returns blocks of every trained layer."""
        return [block for probe in self._probes for block in probe.blocks(most, generator)]

    def null(self) -> Record:
        """Returns a sample that touches no layer."""
        return ()

    def together(self, records: Sequence[Record]) -> Record:
        """Returns one sample that touches every layer as the given ones do."""
        return tuple(excitation for record in records for excitation in record)

    def ordinary(self, count: int, generator: torch.Generator) -> list[Record]:
        """Returns random inputs through the whole model, as many with large losses as with small ones."""
        scales = [10.0 ** (k % 4 - 2) for k in range(count)]
        return [self._whole(self._input(generator), scale, generator) for scale in scales]

    def mates(self, generator: torch.Generator) -> list[Record]:
        """Returns records that touch the last layer alone, so that no other is computed for them."""
        block, bound = self._probes[-1].blocks(1, generator)[-1], self.claim.max_grad_norm
        units, long = torch.eye(len(block.labels)), LONG * max(1.0, bound)
        lengths = (long, SHORT[0] * bound, long, SHORT[1] * bound)
        return [block.record(units[k % len(units)], length) for k, length in enumerate(lengths)]

    def hostile(self, generator: torch.Generator) -> list[Hostile]:
        """Returns extreme inputs and losses, through the whole model and directly into all layers at once."""
        x = self._input(generator)
        records = {f"loss x {scale:g}": self._whole(x, scale, generator) for scale in (1e-20, 1.0, 1e6, 1e15)}
        if x.is_floating_point():
            records |= {f"input x {scale:g}": self._whole(x * scale, 1.0, generator) for scale in (0.0, 1e6)}
        records |= {f"layers x {scale:g}": self._into_all_layers(scale, generator) for scale in (1.0, 1e6)}
        block, bound = self._probes[-1].blocks(1, generator)[-1], self.claim.max_grad_norm
        records |= {
            f"one layer, {n:g} bounds": block.record(torch.eye(len(block.labels))[0], n * bound) for n in BEYOND
        }
        not_finite = {"loss NaN": self._whole(x, math.nan, generator), "loss inf": self._whole(x, math.inf, generator)}
        not_finite["loss x 1e30"] = self._whole(x, 1e30, generator)  # finite, but its square is not
        if x.is_floating_point():
            not_finite |= {f"input {v}": self._whole(x * v, 1.0, generator) for v in (math.nan, math.inf)}
        return [Hostile(name, record, name in records) for name, record in (records | not_finite).items()]

    @staticmethod
    def _offsets(released: Sequence[nn.Parameter]) -> dict[nn.Parameter, int]:
        """Returns where each parameter begins in the flat release."""
        sizes = (parameter.numel() for parameter in released)
        return dict(zip(released, itertools.accumulate(sizes, initial=0), strict=False))

    def _input(self, generator: torch.Generator) -> Tensor:
        if not self._example.is_floating_point():
            return self._example
        return torch.randn(self._example.shape, generator=generator)

    def _whole(self, x: Tensor, scale: float, generator: torch.Generator) -> Record:
        u = scale * torch.randn(self._seen[""].output_shape, generator=generator)
        return (Excitation("", slice(None), x.flatten(), slice(None), u.flatten()),)

    def _into_all_layers(self, scale: float, generator: torch.Generator) -> Record:
        excitations = []
        for probe in self._probes:
            u = scale * torch.randn(probe.seen.output_shape, generator=generator).flatten()
            excitations.append(Excitation(probe.name, slice(None), probe.seen.x.flatten(), slice(None), u))
        return tuple(excitations)

    def _backward(self, modules: Mapping[str, nn.Module], rows: Sequence[Record]) -> None:
        """Calls every layer that a record touches once, and makes one backward pass of the mean over the samples."""
        touched = dict.fromkeys(e.layer for record in rows for e in record)
        if self._calls_every_layer or (rows and not touched):  # the samples must be seen to be there
            every = [probe.name for probe in self._probes]
            touched |= dict.fromkeys(every if self._calls_every_layer else every[-1:])
        loss = torch.zeros(())
        for name in touched:
            seen = self._seen[name]
            x = torch.zeros(len(rows), *seen.x.shape, dtype=seen.x.dtype)
            u = torch.zeros(len(rows), *seen.output_shape)
            for row, record in enumerate(rows):
                for e in record:
                    if e.layer == name:
                        x[row].view(-1)[e.x_at] = e.x.to(x.dtype)
                        u[row].view(-1)[e.u_at] = e.u.to(u.dtype)
            loss = loss + (modules[name](x) * u).sum()
        if touched:
            (loss / max(len(rows), 1)).backward()


def _trace(model: nn.Module, example: Tensor) -> dict[str, Seen]:
    """Returns what every module takes and gives for one sample."""
    seen: dict[str, Seen] = {}
    handles = []
    for name, module in model.named_modules():

        def note(_: nn.Module, args: tuple[Any, ...], output: Any, name: str = name) -> None:
            if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
                seen.setdefault(name, Seen(args[0][0].detach().clone(), tuple(output.shape[1:])))

        handles.append(module.register_forward_hook(note))
    with torch.no_grad():
        model(example[None])
    for handle in handles:
        handle.remove()
    return seen
