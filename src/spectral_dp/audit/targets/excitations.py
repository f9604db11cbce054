"""Records that make a chosen gradient in a chosen layer, through the layer's own forward and backward pass.

Calling a layer with an input ``x`` and the loss ``<layer(x), u>`` gives it the gradient that a sample with that input
and that output gradient would give it, and no other layer any:

    dense           x a signal s, u = e_i             row i of the weight gets s
    block-circulant x_j a signal s, u = e_(i d)       block (i, j) gets s
    convolution     x a plane s around a position,    kernel plane (i, j) gets s
                    u one there, in channel i
    embedding       a token of number v, u = s        row v gets s
    any bias        x = 0, u = e_i                    entry i gets 1
    anything else   as the model calls it, u = s      whatever that is

Anything else are layers of other kinds, such as an LSTM or an attention. They are called with the arguments that the
model hands to them when it is given a sample: a :class:`Passage`.

The bias of a layer always gets ``u`` as well. Signals are long (``target.LONG``) and ``u`` is of length one, so that
its share of the clipped gradient is negligible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from spectral_dp.audit.targets.calls import Seen
from spectral_dp.audit.targets.function import spectrum_kinds
from spectral_dp.audit.targets.samples import Sample
from spectral_dp.audit.targets.target import Block, Kind
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.public_basis import PublicBasis
from spectral_dp.mechanism.transforms import Transform, get_transform

#: Directions tried in each block where there are too many to try all.
MOST_DIRECTIONS = 32

#: Samples that are sent to a layer for which there is no recipe.
MOST_SAMPLES = 4

_KNOWN = (BlockCirculantLinear, nn.Conv1d, nn.Conv2d, nn.Linear, nn.Embedding)


class Excitation(NamedTuple):
    """What one sample puts into one layer: entries of its flattened input, and of the flattened loss weights."""

    layer: str
    x_at: Tensor | slice
    x: Tensor
    u_at: Tensor | slice
    u: Tensor


class Passage(NamedTuple):
    """A sample that goes through the model as far as one layer, whose output the loss weighs.

    Attributes:
        layer: Name of the layer. The empty name is the whole model.
        sample: The sample that the model is given.
        u: Loss weights, in the shape of the layer's longest output.
        gain: Factor by which what reaches the layer is multiplied.
    """

    layer: str
    sample: Sample
    u: Tensor
    gain: float = 1.0


class LayerProbe(NamedTuple):
    """A layer, and where in the release its parameters lie.

    Attributes:
        name: Its name in the model.
        module: Itself.
        seen: Its input and output.
        samples: Samples that may be sent to it through the model.
        offsets: Where its trained parameters begin in the flat release, by name.
        transform: Of the coordinates that are filtered, where the layer has any.
        layout: Shape of the image or sequence that was flattened into a dense layer, where it is filtered over that.
        signal: Whether a convolution is filtered over its input's plane (Algorithm 2) and not over the kernel's.
    """

    name: str
    module: nn.Module
    seen: Seen
    samples: Sequence[Sample]
    offsets: Mapping[str, int]
    transform: Transform | None = None
    layout: tuple[int, ...] | None = None
    signal: bool = False

    @property
    def has_recipe(self) -> bool:
        """Whether gradients of this layer can be chosen, by calling it alone with an input of our own."""
        return isinstance(self.module, _KNOWN)

    @property
    def is_reached(self) -> bool:
        """Whether a record can be sent to the layer. One whose output all samples share has only the whole model."""
        return self.has_recipe or self.seen.output_axis is not None

    def blocks(self, most: int, generator: torch.Generator) -> list[Block]:
        """At most ``most`` blocks of the weight, and one of the bias."""
        module, blocks = self.module, list[Block]()
        if "weight" in self.offsets:
            if isinstance(module, BlockCirculantLinear):
                blocks = _circulant(self, module, most, generator)
            elif isinstance(module, nn.Conv1d | nn.Conv2d):
                blocks = _conv(self, module, most, generator)
            elif isinstance(module, nn.Linear):
                blocks = _dense(self, module, most, generator)
            elif isinstance(module, nn.Embedding):
                blocks = _embedding(self, module, most, generator)
        if self.has_recipe and "bias" in self.offsets:
            blocks.append(_bias(self))
        if blocks or self.seen.output_axis is None:
            return blocks
        return [_generic(self, k, generator) for k in range(min(most, MOST_SAMPLES, len(self.samples)))]


def _dense(probe: LayerProbe, module: nn.Linear, most: int, generator: torch.Generator) -> list[Block]:
    """Rows of the weight; of one fed by an image, the plane of one channel, in its spectrum; or in a public basis."""
    m, n = module.out_features, module.in_features
    if probe.layout is not None and len(probe.layout) > 1:
        channels, *plane = probe.layout
        directions = chosen_directions((probe.transform or get_transform("dct")).basis(plane), generator)
    elif isinstance(probe.transform, PublicBasis):
        channels, directions = 1, chosen_directions(probe.transform.basis(probe.transform.rank), generator)
    else:
        channels, places = 1, spread(n, min(8, n), generator)
        kinds = tuple(Kind.LAST if j == n - 1 else Kind.INTERIOR for j in places)
        directions = Directions(torch.eye(n).double()[places], tuple(f"input {j}" for j in places), kinds)
    blocks, area = [], n // channels
    for i in spread(m, most, generator):
        channel = channels - 1 if i == m - 1 else i % channels
        inputs = channel * area + torch.arange(area)  # with tokens, all but the first stay zero
        name = f"row {i}" if channels == 1 else f"row {i}, channel {channel}"
        support, make = probe.offsets["weight"] + i * n + inputs, _into(probe.name, inputs, torch.tensor([i]))
        blocks.append(directions.block(probe.name, name, support, make, is_last=i == m - 1))
    return blocks


def _circulant(probe: LayerProbe, module: BlockCirculantLinear, most: int, generator: torch.Generator) -> list[Block]:
    p, q, d = module.weight.shape
    whole = max(module.in_features // d, 1)  # an input block that is cut off cannot carry every signal
    width = min(d, module.in_features)
    basis = get_transform("fourier").basis(d)
    if width < d:
        basis = torch.linalg.qr(basis[:, :width].T).Q.T
    frequencies = get_transform("fourier").frequencies(d).flatten().tolist()
    labels = tuple(f"frequency {f}, coordinate {k}" for k, f in enumerate(frequencies[:width]))
    directions = Directions(basis, labels, spectrum_kinds(width))
    directions = directions if width <= MOST_DIRECTIONS else directions.some(generator)
    blocks = []
    for flat in spread(p * whole, most, generator):
        i, j = divmod(flat, whole)
        support = probe.offsets["weight"] + (i * q + j) * d + torch.arange(d)
        make = _into(probe.name, j * d + torch.arange(width), torch.tensor([i * d]))
        is_last = i == p - 1 and j == q - 1
        blocks.append(directions.block(probe.name, f"block ({i}, {j})", support, make, is_last=is_last))
    return blocks


def _conv(probe: LayerProbe, module: nn.Conv1d | nn.Conv2d, most: int, generator: torch.Generator) -> list[Block]:
    size, out_size = probe.seen.x.shape[1:], probe.seen.output_shape[1:]
    before = module._reversed_padding_repeated_twice[::-1][::2]
    # The positions of the input under the kernel, along each axis, at an output that padding does not touch.
    taps, position = [], []
    for axis, kernel in enumerate(module.kernel_size):
        stride, under_kernel = module.stride[axis], module.dilation[axis] * torch.arange(kernel)
        last = size[axis] - 1 - int(under_kernel[-1])
        reach = [o for o in range(out_size[axis]) if 0 <= o * stride - before[axis] <= last]
        if not reach:
            return []
        o = reach[len(reach) // 2]
        position.append(torch.tensor([o]))
        taps.append(o * stride - before[axis] + under_kernel)
    planes, area = module.in_channels // module.groups, torch.Size(size).numel()
    under, at = _flat(taps, size), _flat(position, out_size)
    transform = probe.transform if probe.transform is not None and not probe.signal else get_transform("dct")
    kinds = chosen_directions(transform.basis(tuple(module.kernel_size)), generator)
    whole = None
    if probe.signal:  # Algorithm 2 filters the input's plane: try frequencies of that, too
        whole = chosen_directions(get_transform("fourier").basis(tuple(size)), generator)
    blocks = []
    for flat in spread(module.out_channels * planes, most, generator):
        i, j = divmod(flat, planes)
        channel = (i // (module.out_channels // module.groups)) * planes + j
        u_at = i * torch.Size(out_size).numel() + at
        support = probe.offsets["weight"] + flat * len(under) + torch.arange(len(under))
        is_last = flat == module.out_channels * planes - 1
        make = _into(probe.name, channel * area + under, u_at)
        blocks.append(kinds.block(probe.name, f"kernel ({i}, {j})", support, make, is_last=is_last))
        if whole is not None:
            make = _into(probe.name, channel * area + torch.arange(area), u_at)
            blocks.append(whole.block(probe.name, f"plane ({i}, {j})", support, make, is_last=False))
    return blocks


def _bias(probe: LayerProbe) -> Block:
    """The first and the last entry of the bias."""
    shape = probe.seen.output_shape
    axis = 0 if isinstance(probe.module, nn.Conv1d | nn.Conv2d) else len(shape) - 1
    width, step = shape[axis], torch.Size(shape[axis + 1 :]).numel()
    places = torch.tensor(sorted({0, width - 1}))
    support = probe.offsets["bias"] + places
    labels = tuple(f"entry {i}" for i in places.tolist())

    def make(signal: Tensor) -> tuple[Excitation, ...]:
        return (Excitation(probe.name, slice(0, 0), torch.zeros(0), places * step, signal),)

    return Block(probe.name, "bias", torch.eye(len(places)).double(), labels, (Kind.BIAS,) * len(places), support, make)


def _embedding(probe: LayerProbe, module: nn.Embedding, most: int, generator: torch.Generator) -> list[Block]:
    """Rows of the table; of one that is filtered over its rows, columns in their spectrum."""
    vocabulary, width = module.weight.shape
    first = probe.offsets["weight"]
    if probe.transform is not None:
        rows = torch.arange(min(vocabulary, probe.seen.x.numel()))  # one for each token of a sample
        if len(rows) < 2:
            return []
        basis = probe.transform.basis((vocabulary,))
        if len(rows) < vocabulary:
            basis = torch.linalg.qr(basis[:, : len(rows)].T).Q.T
        directions = chosen_directions(basis, generator)
        every = first + torch.arange(vocabulary) * width
        return [
            directions.block(
                probe.name, f"column {j}", every + j, _tokens(probe, rows, rows * width + j), is_last=j == width - 1
            )
            for j in spread(width, most, generator)
        ]
    places = spread(width, min(8, width), generator)
    kinds = tuple(Kind.LAST if j == width - 1 else Kind.INTERIOR for j in places)
    directions = Directions(torch.eye(width).double()[places], tuple(f"number {j}" for j in places), kinds)
    trained = [v for v in range(vocabulary) if v != module.padding_idx]
    return [
        directions.block(
            probe.name,
            f"row {v}",
            first + v * width + torch.arange(width),
            _tokens(probe, torch.tensor([v]), torch.arange(width)),
            is_last=v == trained[-1],
        )
        for v in (trained[k] for k in spread(len(trained), most, generator))
    ]


def _tokens(probe: LayerProbe, tokens: Tensor, u_at: Tensor) -> Callable[[Tensor], tuple[Excitation, ...]]:
    return lambda signal: (Excitation(probe.name, torch.arange(len(tokens)), tokens, u_at, signal),)


def _generic(probe: LayerProbe, sample: int, generator: torch.Generator) -> Block:
    """Random directions of the output gradient, for layers of which no more is known."""
    shape = probe.seen.output_shape
    n = torch.Size(shape).numel()
    k = min(n, 8)
    basis = torch.linalg.qr(torch.randn(n, k, generator=generator).double()).Q.T
    first = min(probe.offsets.values())
    count = sum(p.numel() for name, p in probe.module.named_parameters() if name in probe.offsets)

    def make(signal: Tensor) -> tuple[Passage, ...]:
        return (Passage(probe.name, probe.samples[sample], signal.view(shape)),)

    labels = tuple(f"random output gradient {i}" for i in range(k))
    name = f"sample {sample}"
    return Block(probe.name, name, basis, labels, (Kind.INTERIOR,) * k, first + torch.arange(count), make)


class Directions(NamedTuple):
    """Orthonormal signals with what they are."""

    basis: Tensor
    labels: tuple[str, ...]
    kinds: tuple[Kind, ...]

    def some(self, generator: torch.Generator) -> Directions:
        """The first, the last and some between."""
        rows = spread(len(self.labels), MOST_DIRECTIONS, generator)
        return Directions(self.basis[rows], tuple(self.labels[r] for r in rows), tuple(self.kinds[r] for r in rows))

    def block(
        self, layer: str, name: str, support: Tensor, make: Callable[[Tensor], object], *, is_last: bool
    ) -> Block:
        """A block with these directions; in the last block of a layer the last direction is the last coordinate."""
        kinds: tuple[Kind, ...] = tuple(Kind.INTERIOR if k is Kind.LAST else k for k in self.kinds)
        kinds = (*kinds[:-1], Kind.LAST) if is_last else kinds
        return Block(layer, name, self.basis, self.labels, kinds, support, make)


def chosen_directions(basis: Tensor, generator: torch.Generator) -> Directions:
    """Directions of a transform's basis: all of them, or the first, the last and some between."""
    n = len(basis)
    kinds = (Kind.DC, *(Kind.INTERIOR,) * (n - 2), Kind.LAST) if n > 1 else (Kind.LAST,)
    every = Directions(basis.double(), tuple(f"coordinate {i}" for i in range(n)), kinds)
    return every if n <= MOST_DIRECTIONS else every.some(generator)


def spread(count: int, most: int, generator: torch.Generator) -> list[int]:
    """At most ``most`` of ``range(count)``: the first, the last and others at random."""
    if count <= most:
        return list(range(count))
    between = (torch.randperm(count - 2, generator=generator)[: max(most - 2, 0)] + 1).tolist()
    return sorted({0, count - 1, *between})


def _into(layer: str, x_at: Tensor, u_at: Tensor) -> Callable[[Tensor], tuple[Excitation, ...]]:
    return lambda signal: (Excitation(layer, x_at, signal, u_at, torch.ones(len(u_at)).double()),)


def _flat(positions: list[Tensor], size: tuple[int, ...]) -> Tensor:
    """Returns the flat indices into a plane of the positions along each axis."""
    return torch.from_numpy(np.ravel_multi_index(np.ix_(*(p.numpy() for p in positions)), tuple(size))).flatten()
