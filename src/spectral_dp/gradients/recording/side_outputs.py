"""What a forward pass leaves on its module besides what it returns: tensors stored as attributes, buffers it wrote.

An auxiliary loss that a module stores on itself (``self.penalty = ...``) looks like any other tensor. While the module
is recorded its parameters count as constants, so such a loss would train everything but the module's own weights,
silently. A stored tensor that the loss turns out to depend on is therefore an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from spectral_dp.gradients.recording.fingerprint import OF_TORCH


class Stored(NamedTuple):
    """A tensor that an attribute of a module holds, itself or in a list, tuple or dictionary."""

    attributes: dict[str, Any]
    name: str
    key: Any  # of the container; None where the attribute is the tensor
    value: Tensor

    def replace(self, by: Tensor) -> None:
        """Puts another tensor in its place, unless it is there no longer."""
        holder = self.attributes.get(self.name)
        if self.key is None:
            if holder is self.value:
                self.attributes[self.name] = by
        elif isinstance(holder, list | dict):
            if dict(_items(holder)).get(self.key) is self.value:
                holder[self.key] = by
        elif isinstance(holder, tuple):
            make = getattr(holder, "_make", tuple)  # a named tuple stays one
            self.attributes[self.name] = make(by if item is self.value else item for item in holder)


class SideOutputs:
    """Looks at a module before its forward pass and again after it.

    Sees the attributes of the module and of its parts. Not what is stored elsewhere, such as in a global list.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: list[Tensor] = []
        self._buffers: dict[str, tuple[Tensor, int]] = {}
        self._is_plain = _stores_nothing(module)
        if self._is_plain:
            return
        self._before = [stored.value for stored in stored_tensors(module)]
        self._buffers = {name: (b, b._version) for name, b in module.named_buffers()}

    def written_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that were written since: the next forward pass may write them again."""
        if self._is_plain:
            return {}
        return {
            name: b.detach().clone()
            for name, b in self._module.named_buffers()
            if name not in self._buffers or self._buffers[name][0] is not b or self._buffers[name][1] != b._version
        }

    def refuse(self, harmless: Mapping[Tensor, Tensor], hook: Callable[[Tensor], None]) -> list[tuple[Stored, Tensor]]:
        """Replaces what was stored since by aliases that call a hook when the backward pass comes to them.

        Aliases, because a stored tensor may also lie on the way to the output, where the backward pass has to go.

        Args:
            harmless: What is no side output, such as the input, and what to put in its place.
            hook: Raises the error.

        Returns:
            The aliases as they are stored, each with what it replaces.
        """
        if self._is_plain:
            return []
        known = {id(t): t for t in self._before} | {id(t): other for t, other in harmless.items()}
        replaced = []
        for stored in list(stored_tensors(self._module)):
            value = stored.value
            if id(value) in known:
                stored.replace(known[id(value)])
            elif value.is_floating_point():
                alias = value.detach().requires_grad_()
                alias.register_hook(hook)
                stored.replace(alias)
                replaced.append((stored._replace(value=alias), value))
        return replaced


def stored_tensors(module: nn.Module) -> Iterator[Stored]:
    """All tensors that a module and its parts hold as attributes, parameters and buffers apart."""
    for part in module.modules():
        attributes = vars(part)
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                yield Stored(attributes, name, None, value)
            elif isinstance(value, list | tuple | dict) and name not in OF_TORCH:
                yield from (Stored(attributes, name, key, v) for key, v in _items(value) if isinstance(v, Tensor))


def _stores_nothing(module: nn.Module) -> bool:
    """Whether a module is a layer of torch's or ours as it was written, and without parts: these only return."""
    return (
        type(module).__module__.startswith(("torch.nn.", "spectral_dp.layers"))
        and "forward" not in vars(module)
        and not (module._modules or module._buffers or module._forward_hooks or module._forward_pre_hooks)
    )


def _items(container: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    return iter(container.items() if isinstance(container, dict) else enumerate(container))
