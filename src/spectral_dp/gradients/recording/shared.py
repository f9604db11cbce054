"""Tensors that all samples of a batch share, each with a copy of its own for the sake of its gradient.

Position embeddings, class tokens, biases over pairs of positions and layer scales are computed once and used for all
samples. Autograd then returns the *sum* of the samples' gradients, and what each contributed is gone. A
:class:`Shared` tensor looks like the one that was computed, ``(...)``. Behind it stands a *wide* one, ``(B, ...)``,
with an entry for each sample, all the same: an expanded view, so it takes no memory. What is done to the tensor is done
to each entry (``vmap``), until it meets a tensor that has rows of the samples: there, entry ``b`` is used for the
rows of sample ``b``, and the result is an ordinary tensor. So the gradient that arrives at the wide tensor is that of
each sample.

Which operations are such meetings is known from a trial run; see ``samples.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class Operation(NamedTuple):
    """An operation with shared tensors among its arguments.

    Attributes:
        func: What torch was asked to do.
        leaves: The arguments, flattened.
        structure: How they were arranged, as ``(args, kwargs)``.
    """

    func: Callable[..., Any]
    leaves: list[Any]
    structure: TreeSpec

    @property
    def name(self) -> str:
        """The name of the operation; of an attribute (``t.T``), that of the attribute."""
        owner = getattr(getattr(self.func, "__self__", None), "__name__", "")
        name = getattr(self.func, "__name__", repr(self.func))
        return f"{owner}.{name}" if name == "__get__" else name

    @property
    def origins(self) -> list[int]:
        """What its shared arguments were made of."""
        return [v.origin for v in self.leaves if isinstance(v, Shared)]

    def run(self, leaves: Sequence[Any]) -> Any:
        """Does it with other arguments in the place of these."""
        args, kwargs = tree_unflatten(list(leaves), self.structure)
        return self.func(*args, **kwargs)

    def plain(self) -> Any:
        """Does it with what shared tensors look like."""
        return self.run([v.as_subclass(Tensor) if isinstance(v, Shared) else v for v in self.leaves])

    @property
    def writes(self) -> bool:
        """Whether it changes its first argument in place."""
        name = self.name
        return (name.endswith("_") and not name.endswith("__")) or name in _AUGMENTED or name == "__setitem__"


class Within(Protocol):
    """The forward pass that a shared tensor belongs to: decides what an operation with it means."""

    def apply(self, operation: Operation) -> Any: ...


class Shared(Tensor):
    """A tensor that samples share; see the module.

    Attributes:
        wide: ``(B, ...)``, an entry for each sample; in a trial run, the tensor itself.
        origin: A number for what it was made of, the same in every forward pass.
        within: The forward pass that it belongs to.
        stands_for: The parameter in whose place it is, if any.
    """

    wide: Tensor
    origin: int
    within: Within
    stands_for: Tensor | None = None

    @staticmethod
    def make(looks: Tensor, wide: Tensor, origin: int, within: Within) -> Shared:
        """Makes one.

        It needs a gradient if the wide one does, as model code may ask. None may ever arrive at it: that would be one
        that is missing at the wide one.
        """
        with torch._C.DisableTorchFunctionSubclass():
            shared = looks.detach().as_subclass(Shared)
            if wide.requires_grad:
                shared.requires_grad_().register_hook(_refuse_lost)
        shared.wide, shared.origin, shared.within = wide, origin, within
        return shared

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # what we do with them is not to come here again
            leaves, structure = tree_flatten((args, kwargs or {}))
            operation = Operation(func, leaves, structure)
            if operation.name == "requires_grad.__get__":
                return operation.run(leaves)  # of itself: what it looks like needs none under torch.no_grad()
            if operation.name in _WITHOUT_GRADIENT or operation.name in _OF_SHAPE_ONLY:
                return operation.plain()
            within = next((v.within for v in leaves if isinstance(v, Shared)), None)
            if within is None:  # in a container that torch looks into and we do not
                raise TypeError(f"cannot follow what samples share into the arguments of {operation.name}")
            return within.apply(operation)


def _refuse_lost(_: Tensor) -> None:
    raise RuntimeError(
        "a parameter that a module holds itself, or what samples share, was used in a way that per-sample gradients "
        "cannot be followed through: a torch.autograd.Function, a function of torch.jit.script, an extension, or an "
        "activation checkpoint with use_reentrant=True. Use operations of torch, or give it one entry for each sample "
        "first (x.expand(len(batch), -1)), and use_reentrant=False"
    )


def for_each_sample(operation: Operation, origin: int, within: Within) -> Any:
    """Does an operation, that no rows of samples take part in, to each entry; the results are shared again."""
    if operation.writes and isinstance(operation.leaves[0], Shared):
        raise RuntimeError(
            f"{operation.name} changes in place what all samples share: use the operation that returns a new tensor"
        )
    leaves = [v.wide if isinstance(v, Shared) else v for v in operation.leaves]
    dims = [0 if isinstance(v, Shared) else None for v in operation.leaves]
    results, rebuild = _mapped(operation, leaves, dims, "same")
    return rebuild([_shared_again(t, origin, within) for t in results])


def with_rows(operation: Operation, batched: Sequence[bool], samples: int) -> Any:
    """Does an operation to each entry and the rows of its sample; the results are rows of samples.

    Args:
        operation: The operation.
        batched: Which of its arguments have rows of samples, side by side.
        samples: ``B``.
    """
    if operation.name == "__setitem__" or (operation.writes and not batched[0]):
        raise RuntimeError(
            f"{operation.name} writes what samples share into a tensor in place: use torch.where or torch.cat instead"
        )
    if operation.name in _NOT_MAPPED:
        return _with_shared_as_rows(operation, batched, samples)
    if not any(batched):
        operation = _with_one_samples_size(operation, samples)
        batched = [False] * len(operation.leaves)
    leaves, dims = [], []
    for v, has_rows in zip(operation.leaves, batched, strict=True):
        is_shared = isinstance(v, Shared)
        leaves.append(v.wide if is_shared else v.unflatten(0, (samples, -1)) if has_rows else v)
        dims.append(0 if is_shared or has_rows else None)
    if operation.writes:
        leaves[0] = leaves[0].clone()
    results, rebuild = _mapped(operation, leaves, dims, "different")
    if any(t.ndim < 2 for t in results):
        raise RuntimeError(f"{operation.name} makes a single number of all rows of a sample: keep the first dimension")
    out = rebuild([t.flatten(0, 1) for t in results])
    return operation.leaves[0].copy_(out) if operation.writes else out


def _with_shared_as_rows(operation: Operation, batched: Sequence[bool], samples: int) -> Any:
    """Does an operation that broadcasts over the first dimension: what samples share is repeated for their rows."""
    n, dims = max((len(v), v.ndim) for v, has_rows in zip(operation.leaves, batched, strict=True) if has_rows)

    def as_rows(v: Shared) -> Tensor:
        shape = (*[1] * (dims - v.ndim), *v.shape)
        if shape[0] != 1:
            raise RuntimeError(f"what samples share is not broadcast over them in {operation.name}: give it one row")
        wide = v.wide.reshape(samples, 1, *shape[1:])
        return wide.expand(samples, n // samples, *shape[1:]).flatten(0, 1)

    return operation.run([as_rows(v) if isinstance(v, Shared) else v for v in operation.leaves])


def _mapped(
    operation: Operation, leaves: Sequence[Any], dims: Sequence[int | None], randomness: str
) -> tuple[list[Tensor], Callable[[list[Any]], Any]]:
    """Runs an operation for each entry; returns its tensors ``(B, ...)``, and how to put others in their places."""
    places = [i for i, dim in enumerate(dims) if dim is not None]
    arranged: list[Any] = []

    def of_entry(*entries: Tensor) -> tuple[Tensor, ...]:
        complete = list(leaves)
        for i, entry in zip(places, entries, strict=True):
            complete[i] = entry
        out, structure = tree_flatten(operation.run(complete))
        arranged[:] = [[not isinstance(v, Tensor) and (v,) for v in out], structure]
        return tuple(v for v in out if isinstance(v, Tensor))

    results = vmap(of_entry, randomness=randomness)(*(leaves[i] for i in places))

    def rebuild(tensors: list[Any]) -> Any:
        remaining, (others, structure) = iter(tensors), arranged
        return tree_unflatten([other[0] if other else next(remaining) for other in others], structure)

    return list(results), rebuild


def _shared_again(wide: Tensor, origin: int, within: Within) -> Tensor:
    return Shared.make(wide[0], wide, origin, within) if wide.is_floating_point() else wide[0]


def _with_one_samples_size(operation: Operation, samples: int) -> Operation:
    """The number of samples is given as a number, as in ``token.expand(len(x), -1, -1)``: for one sample it is one."""
    args, kwargs = tree_unflatten(operation.leaves, operation.structure)
    is_listed = len(args) > 1 and isinstance(args[1], Sequence)
    sizes = list(args[1] if is_listed else args[1:])
    if operation.name not in _SIZED or kwargs or not sizes or not isinstance(sizes[0], int) or sizes[0] % samples:
        raise RuntimeError(
            f"cannot tell the samples apart in {operation.name} of what they share: use expand(len(x), ...), or let it "
            "be broadcast"
        )
    sizes[0] //= samples
    leaves, structure = tree_flatten(((args[0], tuple(sizes)), {}))
    return Operation(operation.func, leaves, structure)


#: Under vmap, torch chooses a kernel that does not differentiate the mask.
_NOT_MAPPED = frozenset({"scaled_dot_product_attention"})
#: What has no gradient need not be followed. (The rehearsal looks at what modules return in this way.)
_WITHOUT_GRADIENT = frozenset({"detach", "data.__get__"})
_SIZED = frozenset({"expand", "repeat", "tile", "broadcast_to"})
_AUGMENTED = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"})
_OF_SHAPE_ONLY = frozenset(
    {f"{what}_like" for what in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")}
    | {f"new_{what}" for what in ("zeros", "ones", "empty", "full", "tensor")}
)
