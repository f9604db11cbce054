"""Finds the noise map of a target with few releases.

Unit draws show the columns of the map one by one. For a layer of a million weights that would take a million releases.
But noise is drawn a parameter at a time and transformed block by block, alike in all blocks: then a few releases, with
another unit vector in every block, show all columns. That structure is a *hypothesis*, and a test that it passes only
if it holds follows: one more release with random draws everywhere must come out as predicted (two linear maps that
agree on a random vector are equal with probability one). Structures are tried from the simplest; the last makes no
assumption at all and is affordable for small releases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spectral_dp.audit.instruments.noise_map import NoiseMap, Part
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import Record, Target
from spectral_dp.errors import SpectralDPError

#: The most releases, and the most numbers in the matrix, that a map without structure may take.
MOST_RELEASES, MOST_ENTRIES = 4096, 1 << 25

#: Agreement asked of a predicted release, relative to its largest number: float32 rounds in the eighth digit.
TOLERANCE = 1e-4


class Unstructured(SpectralDPError, ValueError):
    """Raised where the noise of a large release has no structure that could be found."""


def find_noise_map(target: Target, batch: int = 3) -> NoiseMap:
    """Finds the noise map of a target.

    Args:
        target: The target.
        batch: How many records a batch has. They contribute nothing.

    Raises:
        Unstructured: If the release is too large for a map without structure, and no structure fits.
    """
    finder = _Finder(target, [target.null()] * batch)
    return finder.by_parameter() or finder.dense()


class _Finder:
    def __init__(self, target: Target, records: Sequence[Record]) -> None:
        self._target, self._records = target, records
        dry = Script()
        self._origin = target.release(records, dry)
        self._shapes, self._drawn = dry.shapes, dry.drawn
        self._releases = 1
        self._generator = torch.Generator().manual_seed(1)

    def by_parameter(self) -> NoiseMap | None:
        """Every parameter has draws of its own: one or several, but equally many each."""
        outputs = self._target.outputs
        each, rest = divmod(len(self._shapes), len(outputs))
        if rest or not each:
            return None
        starts = [0, *itertools.accumulate(math.prod(s) for s in self._shapes)]
        parts, position, words = [], 0, set[str]()
        for k, output in enumerate(outputs):
            size = math.prod(output.shape)
            shapes = self._shapes[k * each : (k + 1) * each]
            if len(set(shapes)) > 1:
                return None
            found = self._part(shapes[0], each, starts[k * each], position, size)
            if found is None:
                return None
            parts.append(found[0])
            words.add(found[1])
            position += size
        whole = NoiseMap(tuple(parts), self._releases, "; ".join(sorted(words)))
        draws = torch.randn(self._drawn, generator=self._generator)
        predicted = torch.cat([(p.maps @ d.double()[..., None]).flatten() for p, d in _split(parts, draws, each)])
        return whole if _agree(self._noise(draws), predicted) else None

    def _part(self, shape: tuple[int, ...], each: int, first: int, start: int, size: int) -> tuple[Part, str] | None:
        """Tries structures for the draws of one parameter, ``each`` tensors of ``shape`` from ``first`` on."""
        for lead, width, is_shared, words in _structures(shape, size):
            # Draws as (each, L, width) -> columns (L, each * width) of every block.
            columns, count = each * width, size // lead if size % lead == 0 else 0
            releases = math.ceil(columns / lead) if is_shared else columns
            if not count or releases > MOST_RELEASES or (1 if is_shared else lead) * count * columns > MOST_ENTRIES:
                continue
            maps = torch.zeros(1 if is_shared else lead, count, columns).double()
            for r in range(releases):
                draws = torch.zeros(lead, columns)
                column = (torch.arange(lead) + r * lead) if is_shared else torch.full((lead,), r)
                blocks = (column < columns).nonzero().flatten()
                draws[blocks, column[blocks]] = 1.0
                y = self._noise(self._stream(draws, each, width, first))[start : start + size].view(lead, count)
                if is_shared:
                    maps[0].T[column[blocks]] = y[blocks]
                else:
                    maps[:, :, r] = y
            part = Part(start, maps, lead, self._target.processes)
            draws = torch.randn(lead, columns, generator=self._generator)
            predicted = torch.zeros(self._target.size).double()
            predicted[start : start + size] = (maps @ draws.double()[..., None]).flatten()
            seen = self._noise(self._stream(draws, each, width, first))
            if _agree(seen, predicted):
                return part, words
        return None

    def _stream(self, draws: Tensor, each: int, width: int, first: int) -> Tensor:
        """The draws ``(L, each * width)`` of one parameter where they are drawn, zeros elsewhere."""
        values = draws.unflatten(1, (each, width)).transpose(0, 1).flatten()
        stream = torch.zeros(self._drawn, dtype=draws.dtype)
        stream[first : first + len(values)] = values
        return stream

    def _noise(self, stream: Tensor) -> Tensor:
        self._releases += 1
        return self._target.release(self._records, Script(stream)) - self._origin

    def dense(self) -> NoiseMap:
        """No assumption: one release for every number drawn."""
        size = self._target.size
        if self._drawn > MOST_RELEASES or self._drawn * size > MOST_ENTRIES:
            raise Unstructured(
                f"{self._drawn} draws make {size} numbers, by no structure that could be found: audit a smaller one"
            )
        columns = [self._noise(torch.eye(self._drawn)[i]) for i in range(self._drawn)]
        maps = torch.stack(columns, 1)[None] if columns else torch.zeros(1, size, 1).double()
        return NoiseMap((Part(0, maps, 1, self._target.processes),), self._releases, "no structure assumed")


def _structures(shape: tuple[int, ...], size: int) -> Iterator[tuple[int, int, bool, str]]:
    """Blocks, draws a block, whether all blocks are alike, and words: from the simplest to none."""
    drawn = math.prod(shape)
    if drawn == size:
        yield size, 1, False, "every number by itself"
    if len(shape) > 1:
        lead = math.prod(shape[:-1])
        yield lead, shape[-1], True, "block by block, all alike"
        yield lead, shape[-1], False, "block by block"
    yield 1, drawn, False, "parameter by parameter"


def _split(parts: Sequence[Part], draws: Tensor, each: int) -> Iterator[tuple[Part, Tensor]]:
    """Every part with its draws, ``(L, each * width)``."""
    position = 0
    for part in parts:
        width = part.maps.shape[2] // each
        values = draws[position : position + each * part.count * width]
        yield part, values.view(each, part.count, width).transpose(0, 1).flatten(1)
        position += len(values)


def _agree(seen: Tensor, predicted: Tensor) -> bool:
    largest = max(float(seen.abs().max()), float(predicted.abs().max()), 1e-300)
    return float((seen - predicted).abs().max()) <= TOLERANCE * largest
