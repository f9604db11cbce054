"""What a forward pass leaves behind in a model must be nothing: raw data that nobody clips or noises.

Statistics of a batch, a codebook that follows its inputs, a bank of earlier samples, an initialisation from the first
batch: each would carry records into every later release, or out with the saved model. So the *values* of everything
that a model holds are compared before and after: a tensor's version counter misses writes through ``.data``,
``.numpy()`` and ``torch.no_grad`` tricks, and says nothing of attributes that are replaced.

Cost. A fingerprint reads every byte once (64-bit sums over a few stretches of each tensor, at the speed of memory:
about 0.1 ms for a million parameters on one CPU core). A training step takes two, a pass without gradients two.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten_with_path, tree_map

_STRETCHES = 8  # sums of a long tensor: what permutes its values moves them between stretches
_SHORT = 4096  # words of a tensor up to which each is weighted by its place
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
_COMPUTED_FROM = ("_orig", "_v")  # weight_norm, spectral_norm and prune compute `weight` from such parameters


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
            if parameter is not None:
                found[prefix + name] = Entry("parameter", parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None and name != "num_batches_tracked":
                found[prefix + name] = Entry("buffer", buffer)
        for name, value in _own_attributes(module).items():
            if _numbers(value):
                found[prefix + name] = Entry("attribute", value)
    return found


class Fingerprint:
    """The values of everything that a model holds, in a few numbers each."""

    def __init__(self, model: nn.Module) -> None:
        self._sums = {name: _fingerprint(entry.value) for name, entry in held(model).items()}

    def changes(self, since: Fingerprint) -> list[str]:
        """Returns the names of what differs, came or went."""
        names = dict.fromkeys((*since._sums, *self._sums))
        return [name for name in names if not _equal(self._sums.get(name), since._sums.get(name))]

    def agrees(self, other: Fingerprint, name: str) -> bool:
        """Returns whether something has the same value in both."""
        return _equal(self._sums.get(name), other._sums.get(name))


class StateGuard:
    """Watches the forward passes of a model, and what they leave behind in it.

    A pass begins when a module of the model is called that no other module of it is calling. Passes with gradients are
    looked at when :meth:`check` is called (by the step that uses them), others as soon as they end. What happens
    between steps, outside of passes, is the user's own business: averages, clamped weights, a restored checkpoint.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._members = weakref.WeakSet(model.modules())
        self._depth = self._pauses = 0
        self._before: Fingerprint | None = None
        self._allowed: set[str] = set()
        this = weakref.ref(self)  # a hook must not keep its guard alive

        def enter(module: nn.Module, _: Any) -> None:
            if (guard := this()) is not None:
                guard._enter(module)

        def leave(module: nn.Module, *_: Any) -> None:
            if (guard := this()) is not None:
                guard._leave(module)

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        self.remove = weakref.finalize(self, _remove_all, handles)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets modules be called without being watched."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def allow(self, names: Iterable[str]) -> None:
        """Lets these be written from now on: what is written there was shown not to depend on the data."""
        self._allowed.update(names)

    def changed(self) -> list[str]:
        """Returns what the passes since the last look have changed and were not allowed to; the next look is anew."""
        before, self._before, self._depth = self._before, None, 0
        if before is None:
            return []
        return [name for name in Fingerprint(self._model).changes(before) if name not in self._allowed]

    def check(self) -> None:
        """Raises ``RuntimeError`` if the passes since the last look have changed anything."""
        if changed := self.changed():
            raise RuntimeError(self.explanation(changed))

    def explanation(self, changed: Iterable[str]) -> str:
        """Says what changed and what to do about it."""
        entries = held(self._model)
        listed = ", ".join(f"{entries[n].kind} {n!r}" if n in entries else f"{n!r} (now gone)" for n in changed)
        return (
            f"a forward pass left something behind in the model: {listed}. What it writes there is raw data that "
            "nobody clips or noises, and it stays for later steps and in the saved model. Use layers that keep "
            "nothing of their input (GroupNorm rather than running statistics, max_norm=None, initialisation before "
            "the model is made private), and return what the loss needs instead of storing it"
        )

    def _enter(self, module: nn.Module) -> None:
        if self._pauses or module not in self._members:
            return
        self._depth += 1
        if self._depth == 1:
            self._is_first = self._before is None
            if self._is_first:
                self._before = Fingerprint(self._model)

    def _leave(self, module: nn.Module) -> None:
        if self._pauses or module not in self._members or not self._depth:
            return
        self._depth -= 1
        if self._depth == 0 and self._is_first and not torch.is_grad_enabled():
            self.check()


class Keepsake:
    """Copies of a model's buffers and attributes, to put back what passes that do not count have written."""

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (module, _copies(module._buffers), _copies(_own_attributes(module))) for module in model.modules()
        ]

    def restore(self) -> None:
        """Puts everything back that differs; what has come since is taken away."""
        for module, buffers, attributes in self._kept:
            for kept, now in ((buffers, module._buffers), (attributes, _own_attributes(module))):
                for name in now.keys() - kept.keys():
                    delattr(module, name)
                for name, value in kept.items():
                    if name not in now or not _is_same(now[name], value):
                        _put_back(module, name, value, now.get(name))


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """All but what torch keeps there itself, also the weights that its older hooks compute before every pass."""
    computed = {name.removesuffix(end) for name in module._parameters for end in _COMPUTED_FROM if name.endswith(end)}
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH and name not in computed}


def _copies(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tree_map(_copy, value) if _numbers(value) else value for name, value in values.items()}


def _is_same(now: Any, kept: Any) -> bool:
    if now is kept:
        return True
    return bool(_numbers(now)) and _equal(_fingerprint(now), _fingerprint(kept))


def _put_back(module: nn.Module, name: str, kept: Any, now: Any) -> None:
    if isinstance(kept, Tensor) and isinstance(now, Tensor) and kept.shape == now.shape and not now.requires_grad:
        with torch.no_grad():
            now.copy_(kept)  # in place: somebody else may hold it
    else:
        setattr(module, name, tree_map(_copy, kept) if _numbers(kept) else kept)


def _numbers(value: Any) -> list[tuple[Any, Any]]:
    """The tensors, arrays and floats in a value, each with its path there."""
    if isinstance(value, Tensor | np.ndarray | float):
        return [((), value)]
    if not isinstance(value, list | tuple | dict) or not value:
        return []
    return [(p, v) for p, v in tree_flatten_with_path(value)[0] if isinstance(v, Tensor | np.ndarray | float)]


def _fingerprint(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor_fingerprint(value)
    return [
        (str(path), _tensor_fingerprint(leaf) if isinstance(leaf, Tensor) else _other(leaf))
        for path, leaf in _numbers(value)
    ]


def _other(leaf: np.ndarray[Any, Any] | float) -> Any:
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf


@torch.no_grad()
def _tensor_fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """The shape, and sums of the bytes taken eight at a time: a change of any one value changes them."""
    kind = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return kind
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    data = plain.contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # words must be aligned
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    if len(words) <= _SHORT:  # every place has a weight of its own
        sums = (words * torch.arange(1, 2 * len(words) + 1, 2, device=words.device)).sum()
    else:
        sums = torch.stack([stretch.sum() for stretch in words.chunk(_STRETCHES)])
    return (*kind, sums, bytes(data[whole:].tolist()))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _remove_all(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
