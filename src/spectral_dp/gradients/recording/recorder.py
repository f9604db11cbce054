"""Taps: what went into each trained layer, and the gradient that came back to its output.

While a recorder watches, autograd does not compute the plain gradients of the watched parameters (a third of a
training step): they count as constants during the layer's forward pass. The gradient of the layer's output is
still computed, also where nothing before the layer needs it.

Nothing is attached to the model. The hooks are process-wide and look modules up, so that the model stays an ordinary
``nn.Module``: it can be copied, pickled and saved, and after :meth:`Recorder.remove` nothing is left.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spectral_dp.gradients.recording.hooks import Hooks
from spectral_dp.gradients.recording.random_state import RandomState
from spectral_dp.gradients.recording.side_outputs import SideOutputs, Stored


class Call(NamedTuple):
    """Everything a module was called with.

    Attributes:
        args: Its arguments.
        kwargs: Its keyword arguments.
        buffers: Those of its buffers that its forward pass wrote, as it left them.
        output: Its (first) output, where the recorder was asked for it and nobody has changed it in place.
        random_state: The generators as its forward pass found them, where it drew from them and the recorder was asked.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    buffers: Mapping[str, Tensor] = MappingProxyType({})
    output: Tensor | None = None
    random_state: RandomState | None = None


class OutputGradients(NamedTuple):
    """The gradients of the loss with respect to all real outputs of a module whose backward pass is taken over.

    Attributes:
        gradients: One for each output, in their order; None where the loss does not depend on it.
        needed: The identities of those tensors of the call whose gradients are needed further back.
    """

    gradients: tuple[Tensor | None, ...]
    needed: frozenset[int]

    def needs(self, value: Any) -> bool:
        """Returns whether the gradient of a tensor of the call is needed."""
        return id(value) in self.needed


class TakenOver(NamedTuple):
    """What comes of taking over the backward pass of a module.

    Attributes:
        kept: What is kept of the use.
        input_gradients: Tensors of the call, each with the gradient of the loss with respect to it.
    """

    kept: Any
    input_gradients: Sequence[tuple[Tensor, Tensor]]


Kept = TypeVar("Kept")


class Capture(NamedTuple, Generic[Kept]):
    """What a recorder was told to keep of one use of a layer.

    Attributes:
        kept: What was kept of it.
        backward_pass: The number of the backward pass that reached it.
    """

    kept: Kept
    backward_pass: int


class Recorder(Generic[Kept]):
    """Records the uses of some modules.

    A use is recorded when the backward pass reaches it. So forward passes that no backward pass follows leave nothing
    behind, several forward passes before one backward pass are all there, and a layer that was not used has no record.

    Args:
        watched: Each module with the parameters whose plain gradients autograd is to leave out.
        condense: Called during the backward pass, when a use is reached, with the module, what it was called with, and
            the gradient of the loss with respect to its (first) output. Returns what is kept of the use.
        with_output: Modules of which the output is to be recorded too, and the generators that they drew from.
        taken_over: Modules whose backward pass ``condense`` does itself: it gets their :class:`OutputGradients` and
            returns :class:`TakenOver`. A loss that depends on another output than the first of any other module is
            refused.
        needs_input: Tells of a module whether the tensors that it was called with are needed. Of one that does not need
            them, only their shapes are kept (as tensors on the meta device).
    """

    def __init__(
        self,
        watched: Mapping[nn.Module, Iterable[nn.Parameter]],
        condense: Callable[[nn.Module, Call, Any], Kept | TakenOver],
        with_output: Collection[nn.Module] = (),
        taken_over: Collection[nn.Module] = (),
        needs_input: Callable[[nn.Module], bool] = lambda module: True,
    ) -> None:
        self._condense = condense
        self._needs_input = needs_input
        self._with_output = with_output
        self._taken_over = taken_over
        self._watched = {module: tuple(parameters) for module, parameters in watched.items()}
        for other in [r for r in _LIVE if not r._watched.keys().isdisjoint(self._watched)]:
            other.remove()  # two would hide each other's gradients: the latest wins
        _LIVE.add(self)
        self._pauses = 0
        self._captures: dict[nn.Module, list[Capture[Kept]]] = {}
        self._outer: dict[int, int] = {}  # of each backward pass within another one, that other
        self._frozen: dict[nn.Module, tuple[nn.Parameter, ...]] = {}
        self._sides: dict[nn.Module, SideOutputs] = {}
        self._random_states: dict[nn.Module, RandomState] = {}
        self._replaced: list[tuple[Stored, Tensor]] = []
        this = weakref.ref(self)  # a hook must not keep its recorder alive

        def before(module: nn.Module, args: Any) -> None:
            if (recorder := this()) is not None:
                recorder._before(module)

        def after(module: nn.Module, args: Any, *kwargs_and_output: Any) -> Any:
            # Torch leaves the keywords out when the forward pass failed.
            kwargs = kwargs_and_output[0] if len(kwargs_and_output) == 2 else {}
            recorder = this()
            return None if recorder is None else recorder._after(module, args, kwargs, kwargs_and_output[-1])

        handles = [
            # As they are: torch.compile would trace them with the module, and cannot.
            register_module_forward_pre_hook(_disable_dynamo(before)),
            register_module_forward_hook(_disable_dynamo(after), with_kwargs=True, always_call=True),
        ]
        self._hooks = Hooks(self, handles)
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            dynamo.reset()  # what torch.compile has made before calls no hooks, and would give plain gradients

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Lets modules be called without being recorded."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def take(self) -> dict[nn.Module, list[Capture[Kept]]]:
        """Returns all recorded uses and forgets them."""
        for module in list(self._frozen):
            self._restore(module)
        for alias, value in reversed(self._replaced):
            alias.replace(value)
        self._replaced = []
        captures, self._captures, self._outer = self._captures, {}, {}
        return captures

    def remove(self) -> None:
        """Stops watching and forgets everything."""
        _LIVE.discard(self)
        self._hooks.remove()
        self.take()

    def __enter__(self) -> Recorder[Kept]:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before(self, module: nn.Module) -> None:
        if module not in self._watched or self._pauses or not torch.is_grad_enabled():
            return
        self._restore(module)  # a pass that was interrupted, as by Ctrl-C, left it frozen
        trained = tuple(p for p in self._watched[module] if p.requires_grad)
        if trained:
            _check_called_as_it_is(module, trained)
            self._sides[module] = SideOutputs(module)
            if module in self._with_output:
                self._random_states[module] = RandomState.now(trained[0].device)
        for parameter in trained:
            parameter.requires_grad_(False)
        self._frozen[module] = trained

    def _restore(self, module: nn.Module) -> tuple[nn.Parameter, ...]:
        trained = self._frozen.pop(module, ())
        for parameter in trained:
            parameter.requires_grad_(True)
        return trained

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        trained, side = self._restore(module), self._sides.pop(module, None)
        random_state = self._random_states.pop(module, None)
        if output is None or not trained or side is None:  # the forward pass failed, or there is nothing to record
            return None
        if random_state is not None and random_state.is_current():  # it drew nothing
            random_state = None
        call = Call(args, dict(kwargs), side.written_buffers(), random_state=random_state)
        return self._tap(module, call, output, side)

    def _tap(self, module: nn.Module, call: Call, output: Any, side: SideOutputs) -> Any:
        leaves, structure = tree_flatten(output)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not tensors:
            raise TypeError(f"{type(module).__name__} has trained parameters but returned no tensor of real numbers")
        inputs = [v for v in tree_leaves((call.args, dict(call.kwargs))) if isinstance(v, Tensor)]
        no_side_outputs = {v: v for v in inputs}
        if not self._needs_input(module):
            inputs, call = [], _shapes_of(call)
        is_taken_over = module in self._taken_over
        if is_taken_over:
            outputs = [leaves[i].detach() for i in tensors]
            needed = [v for v in inputs if v.requires_grad] or [_anchor(outputs[0])]
            outputs = _Detour.apply(lambda dA: capture(dA), len(tensors), *outputs, *needed)  # type: ignore[no-untyped-call]
        for k, i in enumerate(tensors):
            output = leaves[i]
            no_side_outputs[output] = leaves[i] = outputs[k] if is_taken_over else _hookable(output)
        name = type(module).__name__
        for i in [] if is_taken_over else tensors[1:]:
            leaves[i].register_hook(_refuse(f"on an output of {name} other than its first"))
        self._replaced += side.refuse(no_side_outputs, _refuse(f"on a tensor that {name} stored in its forward pass"))
        first = leaves[tensors[0]]
        output, output_version = (first.detach() if module in self._with_output else None), first._version
        versions = [v._version for v in inputs]
        outer = torch._C._current_graph_task_id()  # of activation checkpointing, which runs the module again; else -1
        this = weakref.ref(self)
        # Let go when the backward pass has been here: the graph may live as long as the loss.
        waiting = [(call, inputs, output)]

        def capture(dA: Any) -> Sequence[Tensor | None]:
            if (recorder := this()) is None:
                if is_taken_over:
                    raise ReferenceError("the recorder that took over this backward pass is gone: keep it until then")
                return ()
            if (is_of_inputs_only := _is_of_inputs_only()) and not is_taken_over:
                return ()
            if not waiting:
                raise RuntimeError(
                    "a second backward pass through the same graph: run the forward pass again, or add the losses and "
                    "call backward() once"
                )
            call, inputs, output = waiting[-1] if is_of_inputs_only else waiting.pop()
            if [v._version for v in inputs] != versions:
                raise RuntimeError(
                    f"the input of {name} was changed in place after its forward pass, so its per-sample gradients "
                    "cannot be computed: replace the in-place operation (x += y) by x = x + y"
                )
            if output is not None and output._version == output_version:
                call = call._replace(output=output)
            backward_pass = torch._C._current_graph_task_id()  # not that of a backward pass within condense
            call = _detached(call)
            found: list[Tensor | None] = []
            kept: Any
            if is_taken_over:
                detached = [v for v in tree_leaves((call.args, dict(call.kwargs))) if isinstance(v, Tensor)]
                ids = [id(v) for v, own in zip(detached, inputs, strict=True) if own.requires_grad]
                taken_over: Any = recorder._condense(module, call, OutputGradients(tuple(dA), frozenset(ids)))
                kept, by_input = taken_over.kept, {id(v): gradient for v, gradient in taken_over.input_gradients}
                if not by_input.keys() >= set(ids):
                    raise RuntimeError(
                        f"{name} was given a tensor that needs a gradient, such as a mask of padding, where its rule "
                        "computes none: detach it"
                    )
                found = [by_input[key] for key in ids]
            else:
                kept = recorder._condense(module, call, dA.detach())
            if not is_of_inputs_only:
                backward_pass = recorder._outermost(backward_pass, outer)
                recorder._captures.setdefault(module, []).append(Capture(kept, backward_pass))
            return found

        def only_capture(dA: Tensor) -> None:
            capture(dA)

        if not is_taken_over:
            first.register_hook(only_capture)
        return tree_unflatten(leaves, structure)

    def _outermost(self, backward_pass: int, outer: int) -> int:
        """The backward pass that the user called: reentrant checkpoints run others within it, of the same samples."""
        if outer not in (-1, backward_pass):
            self._outer[backward_pass] = outer
        while backward_pass in self._outer:
            backward_pass = self._outer[backward_pass]
        return backward_pass


def _check_called_as_it_is(module: nn.Module, trained: Collection[nn.Parameter]) -> None:
    """What replaces parameters, or runs a module on something else than the batch, has another gradient."""
    name = type(module).__name__
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"{name} has trained parameters and was called within a transform of torch.func (vmap, grad, jvp), where "
            "its per-sample gradients cannot be recorded: call it on the whole batch outside of the transform, or "
            "freeze it"
        )
    own = {id(p) for p in module.parameters()}
    if not all(id(p) in own for p in trained):
        raise RuntimeError(
            f"the trained parameters of {name} were replaced by other tensors while it was called, as "
            "torch.func.functional_call does, so its gradient is not that of its own parameters: call the module "
            "itself, compute its weight by torch.nn.utils.parametrize, or freeze its parameters"
        )


def _is_of_inputs_only() -> bool:
    """Whether the backward pass is one of ``torch.autograd.grad``, which leaves the parameters without a gradient."""
    if torch.autograd._is_checkpoint_valid():
        return False
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a gradient with create_graph=True through the private model, as for a gradient penalty: how the penalty "
            "depends on the parameters is not recorded. Leave it out, or compute it by a copy of the model whose "
            "parameters are frozen"
        )
    return True


def _hookable(tensor: Tensor) -> Tensor:
    """A tensor that the backward pass reaches and whose hooks survive in-place operations."""
    if tensor._is_view():  # changed in place, a view loses its hooks
        tensor = tensor.clone()
    if not tensor.requires_grad:  # the first layer: make the backward pass come this far all the same
        tensor = _Anchor.apply(tensor, _anchor(tensor))  # type: ignore[no-untyped-call]
    return tensor


def _refuse(what: str) -> Callable[[Tensor], None]:
    def refuse(_: Tensor) -> None:
        raise RuntimeError(
            f"the loss depends {what}, whose gradient is not recorded: use the first output only, "
            "compute auxiliary losses from it outside of the module, or register a rule"
        )

    return refuse


_LIVE: weakref.WeakSet[Recorder[Any]] = weakref.WeakSet()


class _Anchor(torch.autograd.Function):
    """Makes a tensor require a gradient without a copy, and ends the backward pass there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _Detour(torch.autograd.Function):
    """Leads the backward pass of a module's outputs to a function, and from there to the module's inputs.

    Takes that function, how many outputs there are, the outputs, and those inputs that need a gradient. The graph that
    the module made itself is not used.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[[Any], Sequence[Tensor | None]], count: int, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.count = function, count
        return tuple(t.clone() for t in tensors[:count])  # no views: they may be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.function([None if g is None else g.detach() for g in grads])
        return (None, None, *[None] * ctx.count, *(found or [None]))


def _anchor(like: Tensor) -> Tensor:
    return torch.empty(0, device=like.device, requires_grad=True)


def _detached(call: Call) -> Call:
    if not call.kwargs and all(isinstance(value, Tensor) for value in call.args):
        return call._replace(args=tuple(value.detach() for value in call.args))

    args, kwargs = tree_map(_detached_value, (call.args, dict(call.kwargs)))
    return call._replace(args=args, kwargs=kwargs)


def _detached_value(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _shapes_of(call: Call) -> Call:
    def shape_of(value: Any) -> Any:
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value

    args, kwargs = tree_map(shape_of, (call.args, dict(call.kwargs)))
    return call._replace(args=args, kwargs=kwargs)
