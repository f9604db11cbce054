"""Layers made of several dense maps, such as the gates of an LSTM or the projections of an attention.

    x   (B, T, n) what goes into a map      dA  (B, T, m) gradient of the loss with respect to what comes out of it
    g_b = sum_t dA_bt (x) x_bt, as of a dense layer with tokens

A subclass runs its layer again and goes back through it, to find ``x`` and ``dA`` of each map inside; this takes the
place of the layer's own backward pass, and gives the gradients of its inputs too. Norms and sums are then taken of the
same ``x`` and ``dA``, so that errors in finding these cannot come between the two; nothing of the size of the batch
times the parameters is made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spectral_dp.gradients.norms import bias_norms, token_norms
from spectral_dp.gradients.recording.call import Call, OutputGradients
from spectral_dp.gradients.rules.rule import GhostRule, Module
from spectral_dp.gradients.sums import over_tokens, weigh, weighted_sum
from spectral_dp.mechanism.clipping import row_norms


class DenseMap(NamedTuple):
    """One map ``x -> W x + b`` inside of a layer.

    Attributes:
        weights: Names of the weights, with how many of the columns of ``x`` each takes, side by side.
        biases: Names of the biases; all of them have the same gradient.
        x: As above.
        dA: As above.
    """

    weights: tuple[tuple[str, int], ...]
    biases: tuple[str, ...]
    x: Tensor
    dA: Tensor


class DenseMaps(NamedTuple):
    """All the maps inside of a layer. Those of the same weight give its rows, in their order.

    Attributes:
        maps: The maps.
        formed: Per-sample gradients ``(B, ...)`` of other, small parameters.
    """

    maps: tuple[DenseMap, ...]
    formed: dict[str, Tensor]


#: Tensors that a layer was called with, each with the gradient of the loss with respect to it.
InputGradients = list[tuple[Tensor, Tensor]]


class DenseMapsRule(GhostRule[Module]):
    """Rule of a layer made of dense maps; a subclass has ``open`` and ``by_sample``. Nothing is filtered."""

    @abstractmethod
    def by_sample(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns something of the real outputs of a call with samples in the first dimension, ``(B, ...)``."""

    @abstractmethod
    def open(self, call: Call, dA: OutputGradients) -> tuple[DenseMaps, InputGradients]:
        """Returns the maps inside of a call, given the gradients of its outputs, and the gradients of its inputs."""

    def back(self, call: Call, dA: OutputGradients) -> tuple[tuple[DenseMaps, Tensor], InputGradients]:
        """Goes back through a call: what is kept of it, ``x`` and ``dA``, and the gradients of its inputs."""
        inside, input_gradients = self.open(call, dA)
        maps, formed = self._by_parameter(inside)
        trained = self.trained()
        maps = tuple(kept for each in maps if (kept := _trained_part(each, trained)) is not None)
        formed = {name: z for name, z in formed.items() if name in trained}
        first = maps[0].dA if maps else next(iter(formed.values()))
        input_gradients = [(x, gradient.to(x.dtype)) for x, gradient in input_gradients]
        # Of the dtype in which gradients arrived, which says how far they can be trusted; the maps have a finer one.
        dtypes = [d.dtype for d in dA.gradients if d is not None]
        arrived = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=first.dtype)
        return (DenseMaps(maps, formed), first.new_empty(len(first), 0, dtype=arrived)), input_gradients

    def _by_parameter(self, inside: DenseMaps) -> DenseMaps:
        """The same with one name for each parameter: of one in several places, the gradients are formed and added.

        Two directions of an LSTM may share a weight, for example. Maps are told apart by names, so all maps of a layer
        in which a parameter has several are given up for per-sample gradients.
        """
        names = dict(self.module.named_parameters(remove_duplicate=False))
        if len(names) == len(set(names.values())):
            return inside
        first_names = {parameter: name for name, parameter in self.parameters().items()}
        total: dict[str, Tensor] = {}
        for name, z in self.form(inside, torch.empty(0)).items():
            first = first_names[names[name]]
            total[first] = total[first] + z if first in total else z
        return DenseMaps((), total)

    def squared_norms(self, x: DenseMaps, dA: Tensor) -> Tensor:
        total = dA.new_zeros(len(dA), dtype=torch.float64)
        for each in x.maps if len(dA) else ():
            if each.weights:
                total = total + token_norms(each.x, each.dA)
            if each.biases:
                total = total + len(each.biases) * bias_norms(each.dA)
        for z in x.formed.values():
            total = total + row_norms(z).square()
        return total

    def clipped_sum(self, x: DenseMaps, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        rows: dict[str, list[Tensor]] = {}
        for each in x.maps:
            if each.weights:
                total = _product(*weigh(each.x, each.dA, c))
                for (name, _), part in zip(each.weights, total.split(_widths(each), dim=1), strict=True):
                    rows.setdefault(name, []).append(part)
            if each.biases:
                bias = c.to(each.dA.dtype) @ over_tokens(each.dA)
                for name in each.biases:
                    rows.setdefault(name, []).append(bias)
        sums = {name: weighted_sum(c, z) for name, z in x.formed.items()}
        return sums | {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()}

    def form(self, x: DenseMaps, dA: Tensor) -> dict[str, Tensor]:
        rows: dict[str, list[Tensor]] = {}
        for each in x.maps:
            if each.weights:
                total = each.dA.mT @ each.x
                for (name, _), part in zip(each.weights, total.split(_widths(each), dim=2), strict=True):
                    rows.setdefault(name, []).append(part)
            for name in each.biases:
                rows.setdefault(name, []).append(over_tokens(each.dA))
        return x.formed | {name: torch.cat(parts, dim=1) for name, parts in rows.items()}

    def merge(self, uses: Sequence[tuple[DenseMaps, Tensor]]) -> tuple[DenseMaps, Tensor] | None:
        first, dA = uses[0]
        if len({tuple((m.weights, m.biases) for m in use.maps) for use, _ in uses}) > 1:
            return None
        maps = tuple(
            same[0]._replace(x=torch.cat([m.x for m in same], dim=1), dA=torch.cat([m.dA for m in same], dim=1))
            for same in zip(*(use.maps for use, _ in uses), strict=True)
        )
        formed = {name: torch.stack([use.formed[name] for use, _ in uses]).sum(0) for name in first.formed}
        return DenseMaps(maps, formed), dA


def _trained_part(each: DenseMap, trained: dict[str, Any]) -> DenseMap | None:
    """The columns of a map whose weights are trained; None if nothing of it is."""
    biases = tuple(name for name in each.biases if name in trained)
    weights = tuple(weight for weight in each.weights if weight[0] in trained)
    if len(weights) < len(each.weights):
        columns = zip(each.weights, each.x.split(_widths(each), dim=2), strict=True)
        parts = [part for weight, part in columns if weight in weights]
        x = torch.cat(parts, dim=2) if parts else each.x[:, :, :0]
        each = each._replace(weights=weights, x=x)
    return each._replace(biases=biases) if weights or biases else None


def _widths(each: DenseMap) -> list[int]:
    return [width for _, width in each.weights]


def _product(x: Tensor, dA: Tensor) -> Tensor:
    """``sum_bt dA_bt (x) x_bt``, ``(m, n)``; without a copy where time comes first in memory too."""
    if dA.stride(0) < dA.stride(1):
        x, dA = x.transpose(0, 1), dA.transpose(0, 1)
    return dA.flatten(0, 1).T @ x.flatten(0, 1)
