"""The values of everything that a model holds, in a few numbers each, to see whether any has changed.

A tensor's version counter misses writes through ``.data`` and ``.numpy()``, and says nothing of attributes that are
replaced. So every byte is read: a short tensor is copied, of a long one there are 64-bit sums over a few stretches. A
change of any one value changes them. That is as quick as memory: 0.1 to 0.4 ms for a million parameters on one core,
and some 5 µs a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from spectral_dp.gradients.recording.shared import Shared

_STRETCHES = 8  # sums of a long tensor: what permutes its values moves them between stretches
_SHORT = 4096  # words of a tensor up to which all are kept
_DEPTH = 4  # of lists within lists that is looked into
_LARGE = 1000  # entries from which a list that begins with names or whole numbers is taken to go on so
_COMPUTED_FROM = ("_orig", "_v")  # weight_norm, spectral_norm and prune compute `weight` from such parameters

#: The attributes that every module has.
OF_TORCH = frozenset(vars(nn.Module()))

Number = Tensor | np.ndarray[Any, Any] | np.inexact[Any] | float | complex
_NUMBERS = (Tensor, np.ndarray, np.inexact, float, complex)
_CONTAINERS = (list, tuple, dict, deque)
_OTHERS = frozenset({int, bool, str, type(None)})  # of nearly all attributes; these have no numbers in them


class Entry(NamedTuple):
    """Something that a model holds, and whether it is a parameter, a buffer or an attribute."""

    kind: str
    value: Any


def held(model: nn.Module) -> dict[str, Entry]:
    """Returns all parameters, buffers and attributes with numbers in them, by name.

    Attributes are tensors, arrays and floats, also within lists, tuples and dicts. Whole numbers are left out (counters
    and shapes), and so is the counter of BatchNorm.
    """
    found: dict[str, Entry] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Shared):  # for the time of a forward pass
                found[prefix + name] = Entry("parameter", parameter.stands_for)
            elif parameter is not None:
                found[prefix + name] = Entry("parameter", parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and name != "num_batches_tracked":
                found[prefix + name] = Entry("buffer", buffer)
        for name, value in own_attributes(module).items():
            if has_numbers(value):
                found[prefix + name] = Entry("attribute", value)
    return found


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """All but what torch keeps there itself, also the weights that its older hooks compute before every pass."""
    computed = {name.removesuffix(end) for name in module._parameters for end in _COMPUTED_FROM if name.endswith(end)}
    return {name: value for name, value in vars(module).items() if name not in OF_TORCH and name not in computed}


class Fingerprint:
    """The values of everything that a model holds."""

    def __init__(self, model: nn.Module) -> None:
        self._of = fingerprints({name: entry.value for name, entry in held(model).items()})

    def changes(self, since: Fingerprint) -> list[str]:
        """Returns the names of what differs, came or went."""
        return [name for name in dict.fromkeys((*since._of, *self._of)) if not self.agrees(since, name)]

    def agrees(self, other: Fingerprint, name: str) -> bool:
        """Returns whether something has the same value in both."""
        return self._of.get(name) == other._of.get(name)


@torch.no_grad()
def fingerprints(values: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns plain values for each value, equal if and (but for one chance in many) only if the values are."""
    found: dict[str, list[Any]] = {}
    pending: list[tuple[list[Any], Tensor]] = []
    for name, value in values.items():
        found[name] = read = []
        for number in numbers_in(value):
            facts, words = _read(number)
            read.append(facts)
            if words is not None:
                pending.append((read, words))
    if pending:  # one transfer from the device for all of them
        device = pending[0][1].device
        flat = torch.cat([words if words.device == device else words.to(device) for _, words in pending]).cpu()
        start, all_bytes = 0, flat.numpy().tobytes()
        for read, words in pending:
            end = start + 8 * words.shape[0]
            read.append(all_bytes[start:end])
            start = end
    return found


def numbers_in(value: Any, depth: int = _DEPTH) -> Iterator[Number]:
    """Yields the tensors, arrays and floats in a value."""
    if isinstance(value, _NUMBERS):
        yield value
    elif isinstance(value, _CONTAINERS) and value and depth:
        entries = value.values() if isinstance(value, dict) else value
        if len(value) < _LARGE or not isinstance(next(iter(entries)), str | bytes | int):
            for entry in entries:
                if type(entry) not in _OTHERS:
                    yield from numbers_in(entry, depth - 1)


def has_numbers(value: Any) -> bool:
    """Returns whether there is any."""
    return type(value) not in _OTHERS and next(numbers_in(value), None) is not None


def _read(number: Number) -> tuple[Any, Tensor | None]:
    """What is known of a number without reading it, and its bytes as words; of a long tensor, a few sums of these."""
    if isinstance(number, np.inexact | float | complex):
        return repr(number), None
    if isinstance(number, np.ndarray):
        return (number.shape, str(number.dtype), number.tobytes()), None
    facts = (number.shape, number.dtype, number.device)
    if number.is_meta or number.layout is not torch.strided or number.is_quantized:
        return facts, None
    plain = torch.view_as_real(number.detach().resolve_conj()) if number.is_complex() else number.detach()
    data = plain.contiguous().flatten()  # which alone would leave a vector with gaps, or an expanded one, as it is
    if data.nbytes % 8 or data.storage_offset() * data.element_size() % 8:
        data = nn.functional.pad(data.view(torch.uint8), (0, -data.nbytes % 8))  # whole words, aligned
    words = data.view(torch.int64)
    if (count := words.shape[0]) <= _SHORT:
        return facts, words
    even = count // _STRETCHES * _STRETCHES
    sums = words[:even].view(_STRETCHES, -1).sum(1)
    return facts, sums if even == count else torch.cat([sums, words[even:]])
