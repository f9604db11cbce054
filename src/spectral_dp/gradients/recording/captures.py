"""The backward half of recording: what is kept of a use of a layer when the backward pass reaches it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from spectral_dp.gradients.recording.call import Call, OutputGradients, TakenOver
from spectral_dp.gradients.recording.refusals import is_for_inputs_only

Kept = TypeVar("Kept")


class Capture(NamedTuple, Generic[Kept]):
    """What a recorder was told to keep of one use of a layer.

    Attributes:
        kept: What was kept of it.
        backward_pass: The number of the backward pass that reached it.
    """

    kept: Kept
    backward_pass: int


class Captures(Generic[Kept]):
    """Collects the uses that backward passes reach. The graph of a pass does not keep it alive.

    Args:
        condense: Called when a use is reached; see :class:`~spectral_dp.gradients.recording.recorder.Recorder`.
        with_output: Modules of which the output is to be recorded too.
        taken_over: Modules whose backward pass ``condense`` does itself.

    Attributes:
        found: The uses that were reached, by module.
    """

    def __init__(
        self,
        condense: Callable[[nn.Module, Call, Any], Kept | TakenOver],
        with_output: Collection[nn.Module],
        taken_over: Collection[nn.Module],
    ) -> None:
        self._condense, self._with_output, self._taken_over = condense, with_output, taken_over
        self.found: dict[nn.Module, list[Capture[Kept]]] = {}
        self._outer: dict[int, int] = {}  # of each backward pass within another one, that other

    def take(self) -> dict[nn.Module, list[Capture[Kept]]]:
        """Returns all recorded uses and forgets them."""
        found, self.found, self._outer = self.found, {}, {}
        return found

    def watch(self, module: nn.Module, call: Call, output: Tensor, samples: int | None = None) -> None:
        """Records a use when the backward pass comes to an output; see :meth:`recording`."""
        capture = self.recording(module, call, output, samples)

        def only_capture(dA: Tensor) -> None:
            capture(dA)

        output.register_hook(only_capture)

    def recording(
        self, module: nn.Module, call: Call, output: Tensor, samples: int | None = None
    ) -> Callable[[Any], Sequence[Tensor | None]]:
        """Returns a function that records a use, given the gradient of the output, or all of one that is taken over.

        It returns the gradients of those inputs that need one, where the backward pass is taken over.

        Args:
            module: The module.
            call: What it was called with.
            output: Its output, or what stands for its parameter.
            samples: How many the rows of the output belong to, where the call ``has_rows`` and the output does not.
        """
        name, inputs, is_taken_over = type(module).__name__, call.tensors(), module in self._taken_over
        recorded, output_version = (output.detach() if module in self._with_output else None), output._version
        versions = [v._version for v in inputs]
        outer = torch._C._current_graph_task_id()  # of activation checkpointing, which runs the module again; else -1
        this = weakref.ref(self)
        # Let go when the backward pass has been here: the graph may live as long as the loss.
        waiting = [(call, inputs, recorded)]

        def capture(dA: Any) -> Sequence[Tensor | None]:
            if (captures := this()) is None:
                if is_taken_over:
                    raise ReferenceError("the recorder that took over this backward pass is gone: keep it until then")
                return ()
            if (is_of_inputs_only := is_for_inputs_only()) and not is_taken_over:
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
            if call.has_rows and samples:
                dA = dA.unflatten(0, (samples, -1))
                call = call._replace(output=None if call.output is None else call.output.unflatten(0, (samples, -1)))
            backward_pass = torch._C._current_graph_task_id()  # not that of a backward pass within condense
            call = call.detached()
            found: list[Tensor | None] = []
            kept: Any
            if is_taken_over:
                ids = [id(v) for v, own in zip(call.tensors(), inputs, strict=True) if own.requires_grad]
                taken_over: Any = captures._condense(module, call, OutputGradients(tuple(dA), frozenset(ids)))
                kept, by_input = taken_over.kept, {id(v): gradient for v, gradient in taken_over.input_gradients}
                if not by_input.keys() >= set(ids):
                    raise RuntimeError(
                        f"{name} was given a tensor that needs a gradient, such as a mask of padding, where its rule "
                        "computes none: detach it"
                    )
                found = [by_input[key] for key in ids]
            else:
                kept = captures._condense(module, call, dA.detach())
            if not is_of_inputs_only:
                backward_pass = captures._outermost(backward_pass, outer)
                captures.found.setdefault(module, []).append(Capture(kept, backward_pass))
            return found

        return capture

    def _outermost(self, backward_pass: int, outer: int) -> int:
        """The backward pass that the user called: reentrant checkpoints run others within it, of the same samples."""
        if outer not in (-1, backward_pass):
            self._outer[backward_pass] = outer
        while backward_pass in self._outer:
            backward_pass = self._outer[backward_pass]
        return backward_pass
