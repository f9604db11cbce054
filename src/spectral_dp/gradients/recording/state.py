"""What a forward pass leaves behind in a model must be nothing: raw data that nobody clips or noises.

Statistics of a batch, a codebook that follows its inputs, a bank of earlier samples, an initialisation from the first
batch: each would carry records into every later release, or out with the saved model. So the *values* of everything
that a model holds are compared before and after (``fingerprint.py``). A training step takes two readings of the model,
a pass without gradients two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from spectral_dp.gradients.recording.fingerprint import Fingerprint, fingerprints, held, own_attributes
from spectral_dp.gradients.recording.hooks import Watch


class StateGuard(Watch):
    """Watches the forward passes of a model, and what they leave behind in it.

    A pass begins when a module of the model is called that no other module of it is calling. Passes of a model in
    training mode, with gradients, are looked at when :meth:`check` is called (by the step that uses them), others as
    soon as they end. What happens between steps, outside of passes, is the user's own business: averages, clamped
    weights, a restored checkpoint.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._depth = 0
        self._then: Fingerprint | None = None  # before the first of these passes
        self._allowed: set[str] = set()
        super().__init__(model.modules())

    def allow(self, names: Iterable[str]) -> None:
        """Lets these be written from now on: what is written there was shown not to depend on the data."""
        self._allowed.update(names)

    def changed(self) -> list[str]:
        """Returns what the passes since the last look have changed and were not allowed to; the next look is anew."""
        then, self._then, self._depth = self._then, None, 0
        if then is None:
            return []
        return [name for name in Fingerprint(self._model).changes(then) if name not in self._allowed]

    def check(self) -> None:
        """Raises ``RuntimeError`` if the passes since the last look have changed anything."""
        if changed := self.changed():
            raise RuntimeError(self.explanation(changed))

    def explanation(self, changed: Iterable[str]) -> str:
        """Says what changed and what to do about it."""
        entries = held(self._model)
        listed = ", ".join(
            f"{entries[n].kind} {n!r}" if n in entries else f"attribute {n!r} (set, or removed, by the pass)"
            for n in changed
        )
        return (
            f"a forward pass left something behind in the model: {listed}. What it writes there is raw data that "
            "nobody clips or noises, and it stays for later steps and in the saved model. Use layers that keep "
            "nothing of their input (GroupNorm rather than running statistics, max_norm=None, initialisation from "
            "public data), return what the loss needs instead of storing it, and begin with a fresh model: a parameter "
            "that was written is not put back"
        )

    def _before(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._is_first = self._then is None
            if self._is_first:
                self._then = Fingerprint(self._model)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._depth:
            return
        self._depth -= 1
        is_training = torch.is_grad_enabled() and self._model.training
        if self._depth == 0 and self._is_first and not is_training:
            self.check()


class Keepsake:
    """What a model's buffers, attributes and modes are, and copies of their contents, for passes that do not count.

    Every attribute becomes the *same object* again, with its former contents: a forward pass that is under way may have
    put it there, and its gradients flow through it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        self._kept = [(module, _kept(module._buffers), _kept(own_attributes(module))) for module in model.modules()]

    def restore(self) -> None:
        """Puts everything back that differs; what has come since is taken away."""
        for module, training in self._modes:
            module.training = training
        for module, buffers, attributes in self._kept:
            for kept, now in ((buffers, module._buffers), (attributes, own_attributes(module))):
                for name in now.keys() - kept.keys():
                    delattr(module, name)
                for name, contents in kept.items():
                    value = contents.restored()
                    if name not in now or now[name] is not value:
                        setattr(module, name, value)


class Contents:
    """A value, and what was in it: the numbers of a tensor or an array, the entries of a container."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._copy: Any = None
        if isinstance(value, Tensor):
            self._copy = value.detach().clone()
        elif isinstance(value, np.ndarray | set | list | dict | deque):
            self._copy = value.copy()
        self._inner = {key: Contents(v) for key, v in _entries(value) if isinstance(v, _MUTABLE)}

    def restored(self) -> Any:
        """Returns the value with its former contents: itself, unless they cannot be put back there."""
        value, copy = self._value, self._copy
        if isinstance(value, Tensor | np.ndarray):
            if fingerprints({"": value}) == fingerprints({"": copy}):
                return value
            if isinstance(value, Tensor) and (value.shape != copy.shape or (value.requires_grad and value.is_leaf)):
                return copy.clone()
            if isinstance(value, np.ndarray):
                value[...] = copy
                return value
            with torch.no_grad():
                return value.copy_(copy)  # in place: somebody else may hold it
        inner = {key: contents.restored() for key, contents in self._inner.items()}
        if isinstance(value, tuple):
            if all(value[key] is v for key, v in inner.items()):
                return value
            make = getattr(value, "_make", tuple)  # a named tuple stays one
            return make(inner.get(i, v) for i, v in enumerate(value))
        if isinstance(value, set):
            if value != copy:
                value.clear()
                value.update(copy)
        elif isinstance(value, list | dict | deque):
            for key, v in inner.items():
                copy[key] = v
            if len(value) != len(copy) or any(a is not b for a, b in zip(_flat(value), _flat(copy), strict=True)):
                value.clear()
                (value.update if isinstance(value, dict) else value.extend)(copy)
        return value


_MUTABLE = (Tensor, np.ndarray, set, list, dict, deque, tuple)


def _kept(values: Mapping[str, Any]) -> dict[str, Contents]:
    return {name: Contents(value) for name, value in values.items()}


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple | deque) else ()


def _flat(container: Any) -> list[Any]:
    return [v for entry in container.items() for v in entry] if isinstance(container, dict) else list(container)


def copied(value: Any) -> Any:
    """Copies numbers and the lists and dicts they are in; other objects stay the same."""

    def copy_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        return leaf.copy() if isinstance(leaf, np.ndarray | set) else leaf

    return tree_map(copy_of, value)
