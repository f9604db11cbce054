"""Taps: what went into each trained layer, and the gradient that came back to its output.

While a recorder watches, autograd does not compute the plain gradients of the watched parameters (a third of a
training step): they count as constants during the layer's forward pass. The gradient of the layer's output is
still computed, also where nothing before the layer needs it.

What samples share is given an entry for each of them before it is used (``shared.py``): layers that were given no
samples, such as position embeddings, and parameters that modules hold themselves. Where several rows of a layer belong
to a sample, side by side, its uses come with a dimension for them (``samples.py``).

Nothing is attached to the model. The hooks are process-wide and look modules up, so that the model stays an ordinary
``nn.Module``: it can be copied, pickled and saved, and after :meth:`Recorder.remove` nothing is left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from spectral_dp.gradients.recording import refusals
from spectral_dp.gradients.recording.anchor import Anchor, Detour, Widened, anchor_like, hookable
from spectral_dp.gradients.recording.autocast_state import AutocastState
from spectral_dp.gradients.recording.call import Call, TakenOver, of_samples
from spectral_dp.gradients.recording.captures import Capture, Captures, Kept
from spectral_dp.gradients.recording.hooks import Watch, all_watches
from spectral_dp.gradients.recording.knowledge import Knowledge
from spectral_dp.gradients.recording.passes import Pass
from spectral_dp.gradients.recording.random_state import RandomState
from spectral_dp.gradients.recording.samples import calls_under_way, keywords_of_call, number_of_samples, some_samples
from spectral_dp.gradients.recording.shared import Shared
from spectral_dp.gradients.recording.side_outputs import SideOutputs, Stored
from spectral_dp.gradients.recording.trial import SAMPLES, Origins, Trial, run_both, without_trace


class Recorder(Watch, Generic[Kept]):
    """Records the uses of some modules.

    A use is recorded when the backward pass reaches it. So forward passes that no backward pass follows leave nothing
    behind, several forward passes before one backward pass are all there, and a layer that was not used has no record.

    Args:
        watched: Each module with the parameters whose plain gradients autograd is to leave out.
        condense: Called during the backward pass, when a use is reached, with the module, what it was called with, and
            the gradient of the loss with respect to its (first) output. Returns what is kept of the use.
        with_output: Modules of which the output is to be recorded too, and the generators that they drew from.
        taken_over: Modules whose backward pass ``condense`` does itself: it gets their :class:`OutputGradients` and
            returns :class:`TakenOver`. Each comes with a function that makes of its real outputs a tensor with samples
            in the first dimension; it must be given one row of each. A loss that depends on another output than the
            first of any other module is refused.
        held: Modules whose parameters have no layer, with these by name: each use of one is recorded by itself.
        needs_input: Tells of a module whether the tensors that it was called with are needed. Of one that does not need
            them, only their shapes are kept (as tensors on the meta device).
        members: All modules of the model, which tell where a forward pass begins and how many samples it has. Without
            them, nothing is shared, and rows are recorded as they come.

    Attributes:
        expected_samples: Tells how many samples are at hand, if somebody knows.
    """

    def __init__(
        self,
        watched: Mapping[nn.Module, Iterable[nn.Parameter]],
        condense: Callable[[nn.Module, Call, Any], Kept | TakenOver],
        with_output: Collection[nn.Module] = (),
        taken_over: Mapping[nn.Module, Callable[[Sequence[Tensor]], Tensor]] = MappingProxyType({}),
        held: Mapping[nn.Module, Mapping[str, nn.Parameter]] = MappingProxyType({}),
        needs_input: Callable[[nn.Module], bool] = lambda module: True,
        members: Iterable[nn.Module] = (),
    ) -> None:
        self._captures: Captures[Kept] = Captures(condense, with_output, taken_over)
        self._needs_input = needs_input
        self._with_output = with_output
        self._taken_over = taken_over
        self._watched = {module: tuple(parameters) for module, parameters in watched.items()}
        self._held = {module: dict(parameters) for module, parameters in held.items()}
        members = tuple(members)
        self._knows_samples = bool(members)
        self._pass: Pass | Trial | None = None
        self._calls: list[tuple[nn.Module, AutocastState]] = []  # those under way in the pass
        self._was_tried = False  # in the pass
        self._knowledge = Knowledge()
        self.expected_samples: Callable[[], int | None] = lambda: None
        self._originals: list[tuple[nn.Module, str, Tensor]] = []
        for other in all_watches():
            if isinstance(other, Recorder) and not self._layers().isdisjoint(other._layers()):
                other.remove()  # two would hide each other's gradients: the latest wins
        self._frozen: dict[nn.Module, tuple[nn.Parameter, ...]] = {}
        self._sides: dict[nn.Module, SideOutputs] = {}
        self._random_states: dict[nn.Module, RandomState] = {}
        self._replaced: list[tuple[Stored, Tensor]] = []
        super().__init__((*self._watched, *self._held, *members))
        if (dynamo := sys.modules.get("torch._dynamo")) is not None:
            dynamo.reset()  # what torch.compile has made before calls no hooks, and would give plain gradients

    def take(self) -> dict[nn.Module, list[Capture[Kept]]]:
        """Returns all recorded uses and forgets them."""
        self._end()
        for module in list(self._frozen):
            self._restore(module)
        for alias, value in reversed(self._replaced):
            alias.replace(value)
        self._replaced = []
        return self._captures.take()

    def remove(self) -> None:
        """Stops watching and forgets everything."""
        super().remove()
        self.take()

    def _layers(self) -> set[nn.Module]:
        return {*self._watched, *self._held}

    def __enter__(self) -> Recorder[Kept]:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(self._pass, Trial):
            return
        if self._pass is not None and self._pass.root is module and calls_under_way(module) < 2:
            self._end()  # a pass that was interrupted, as by Ctrl-C, left it there
        if not torch.is_grad_enabled():
            return
        if self._pass is None:
            self._begin(module, args)
        self._calls.append((module, AutocastState.now()))
        if module not in self._watched:
            return
        self._restore(module)  # a pass that was interrupted, as by Ctrl-C, left it frozen
        trained = tuple(p for p in self._watched[module] if p.requires_grad)
        if trained:
            refusals.check_called_as_it_is(module, trained)
            if module in self._taken_over:
                refusals.refuse_shared(module, args, keywords_of_call(module) or {})
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
        if isinstance(self._pass, Trial):
            is_trained = any(p.requires_grad for p in self._watched.get(module, ()))  # others may be within a vmap
            return self._noted(self._pass, module, args, output) if is_trained else None
        if not any(called is module for called, _ in self._calls):  # it was called without gradients
            return None
        called, autocast = self._calls.pop()
        while called is not module:  # what was interrupted within it
            called, autocast = self._calls.pop()
        if self._was_tried:
            autocast.restore()
        trained, side = self._restore(module), self._sides.pop(module, None)
        random_state = self._random_states.pop(module, None)
        try:
            if output is None and isinstance(self._pass, Pass) and self._pass.samples == 0:
                refusals.explain_empty_batch()
            if output is None or not trained or side is None:  # the forward pass failed, or there is nothing to record
                return None
            if not torch.is_grad_enabled():  # switched off meanwhile, as metrics do, and nothing comes back to it
                return None
            if random_state is not None and random_state.is_current():  # it drew nothing
                random_state = None
            call = Call(args, dict(kwargs), side.written_buffers(), random_state=random_state)
            return self._tap(module, call, output, side)
        finally:
            if not self._calls:
                self._end()

    # A pass, and what is tried out in it.

    def _begin(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        self._end()
        kwargs = keywords_of_call(root) or {}
        samples = number_of_samples(args, kwargs, self.expected_samples()) if self._knows_samples else None
        holds = any(p.requires_grad for parameters in self._held.values() for p in parameters.values())
        current = self._pass = Pass(root, args, kwargs, samples, self._knowledge, self._try_out, holds)
        if not holds:
            return
        if current.samples is None:
            raise RuntimeError(
                f"{type(root).__name__} was called without a tensor that has samples in its first dimension, or with a "
                "single row first and more behind it, so it cannot be told how many share the parameters that modules "
                "hold themselves: pass the batch as tensors, those with samples first"
            )
        for module, parameters in self._held.items():
            trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
            refusals.check_called_as_it_is(module, trained.values())
            for name, parameter in trained.items():
                shared = self._for_samples(current, module, name, parameter)
                for alias in [n for n, p in module._parameters.items() if p is parameter]:
                    self._stand_in(module, alias, shared)

    def _end(self) -> None:
        """Ends the pass: parameters are their own again."""
        for module, name, original in reversed(self._originals):
            module._parameters[name] = original  # type: ignore[assignment]
        self._originals, self._calls, self._was_tried = [], [], False
        if isinstance(self._pass, Pass):
            self._pass.end()
        self._pass = None

    def _stand_in(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self._originals.append((module, name, module._parameters[name]))  # type: ignore[arg-type]
        module._parameters[name] = tensor  # type: ignore[assignment]

    def _for_samples(self, current: Pass, module: nn.Module, name: str, parameter: nn.Parameter) -> Tensor:
        """A parameter as samples see it, each with a gradient of its own."""
        samples = current.samples
        assert samples is not None
        wide = Widened.apply(parameter.detach(), samples, anchor_like(parameter))  # type: ignore[no-untyped-call]
        if samples == 0:  # nothing to record
            return Anchor.apply(parameter.detach().clone(), anchor_like(parameter))  # type: ignore[no-untyped-call]
        self._captures.watch(module, Call((), {}, parameter=name), wide)
        if samples == 1:
            return wide[0]
        shared = Shared.make(parameter, wide, current.origins.of_parameter(module, name), current)
        shared.stands_for = parameter
        return shared

    def _try_out(self, current: Pass, knowledge: Knowledge) -> RuntimeError | None:
        """Runs a few samples of a pass to learn what is shared; the pass goes on afterwards."""
        assert current.samples is not None
        calls, self._calls = self._calls, []
        originals, self._originals = self._originals, []

        def run(rows: slice) -> Trial:
            trial = self._pass = Trial(Origins(current.root))
            for module, parameters in self._held.items():
                for name, parameter in parameters.items():
                    if parameter.requires_grad or any(m is module and n == name for m, n, _ in originals):
                        origin = current.origins.of_parameter(module, name)
                        seed = trial.seed(name, origin, parameter.detach().clone(), needs_gradient=True)
                        for alias in [n for m, n, p in originals if m is module and p is parameter] or [name]:
                            self._stand_in(module, alias, seed)
            args, kwargs = some_samples((current.args, current.kwargs), current.samples or 0, rows)
            try:
                current.root(*args, **kwargs)
            finally:
                self._end()
            return trial

        def learn(needs_graph: bool) -> None:
            with without_trace(current.root), torch.set_grad_enabled(needs_graph), torch._C._EnableTorchFunction():
                run_both(run, current.samples or 0, knowledge.learn)

        try:
            try:
                learn(needs_graph=False)
            except Exception:  # perhaps because the model computes gradients by itself, as of its inputs
                learn(needs_graph=True)
        except Exception as error:  # whatever the model says to a batch of a few samples
            failure = RuntimeError(
                f"{type(current.root).__name__} could not be run on a few samples of the batch by themselves, which is "
                "how it is told what samples share: keep samples in the first dimension of the tensors that it is "
                "called with, and what they share in buffers"
            )
            # A message may have the number of samples in it, which is private unless it is that of a trial.
            failure.__cause__ = error if current.samples > SAMPLES else None
            return failure
        finally:
            self._pass, self._calls, self._originals, self._was_tried = current, calls, originals, True
        return None

    def _noted(self, trial: Trial, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Notes the (first) output of a layer in a trial."""
        leaves, structure = tree_flatten(output)
        places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor) and v.is_floating_point()]
        if not places:
            return None
        rows = None
        if module in self._taken_over:
            rows = self._taken_over[module]([leaves[i] for i in places])
        elif module not in self._with_output:
            rows = _input_where_zero(args, leaves[places[0]])
        origin = trial.origins.of_call(module)
        leaves[places[0]] = trial.seed(type(module).__name__, origin, leaves[places[0]], rows)
        return tree_unflatten(leaves, structure)

    # What is recorded of a layer.

    def _tap(self, module: nn.Module, call: Call, output: Any, side: SideOutputs) -> Any:
        leaves, structure = tree_flatten(output)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not tensors:
            raise TypeError(f"{type(module).__name__} has trained parameters but returned no tensor of real numbers")
        if module in self._taken_over:
            self._take_over(module, call, leaves, tensors, side)
            return tree_unflatten(leaves, structure)
        current, inputs, first = self._pass, call.tensors(), leaves[tensors[0]]
        assert isinstance(current, Pass)
        samples, origin = current.samples, current.origins.of_call(module)
        if module is current.root:  # its rows are the samples, however it was given them (bags by offsets)
            samples = None
        rows = first.shape[0] if first.ndim else None
        if samples == 0 and rows:
            return None  # of what samples share, where there are none
        is_shared = isinstance(first, Shared) or (
            samples is not None and current.is_shared(origin, module, next(iter(inputs), None), first)
        )
        no_side_outputs = {v: v for v in inputs}
        for i in tensors:
            output = leaves[i]
            if not isinstance(output, Shared):
                # The output of a dense layer on tokens is a view of a matrix product, which is nowhere else.
                leaves[i] = hookable(output, is_sole=type(module) is nn.Linear)
            if is_shared and output is first:
                assert samples is not None
                leaves[i] = _widened(leaves[i], samples, origin, current)
            no_side_outputs[output] = leaves[i]
        name = type(module).__name__
        for i in tensors[1:]:
            of_samples(leaves[i]).register_hook(
                refusals.refuse_dependence(f"on an output of {name} other than its first")
            )
        self._replaced += side.refuse(
            no_side_outputs, refusals.refuse_dependence(f"on a tensor that {name} stored in its forward pass")
        )
        if is_shared:
            assert samples is not None
            call = call.wide(samples)
        elif samples and rows is not None and rows != samples:
            call = call.with_rows(rows, samples)
        if not self._needs_input(module):
            call = call.shapes()
        self._captures.watch(module, call, of_samples(leaves[tensors[0]]), None if is_shared else samples)
        return tree_unflatten(leaves, structure)

    def _take_over(
        self, module: nn.Module, call: Call, leaves: list[Any], tensors: Sequence[int], side: SideOutputs
    ) -> None:
        """Leads the backward pass around a module; its outputs, the ``leaves`` at these places, are replaced."""
        current, inputs, outputs = self._pass, call.tensors(), [leaves[i].detach() for i in tensors]
        assert isinstance(current, Pass)
        rows = self._taken_over[module](outputs)
        current.check_one_row_each(current.origins.of_call(module), module, next(iter(inputs), None), rows)
        needed = [v for v in inputs if v.requires_grad] or [anchor_like(outputs[0])]
        made: list[Callable[[Any], Sequence[Tensor | None]]] = []  # of the outputs of the detour, so it comes after it
        outputs = Detour.apply(lambda dA: made[0](dA), len(tensors), *outputs, *needed)  # type: ignore[no-untyped-call]
        no_side_outputs = {v: v for v in inputs}
        for i, output in zip(tensors, outputs, strict=True):
            no_side_outputs[leaves[i]] = leaves[i] = output
        what = f"on a tensor that {type(module).__name__} stored in its forward pass"
        self._replaced += side.refuse(no_side_outputs, refusals.refuse_dependence(what))
        made.append(self._captures.recording(module, call, outputs[0]))


def _input_where_zero(args: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """Returns what a layer was given, in the dimensions of its output, if the output is zero: that has no order.

    Adapters and gates begin with zeros. A layer with a rule keeps the order of its rows, so that of its input will do.
    """
    with torch._C.DisableTorchFunctionSubclass():
        x = next((v for v in args if isinstance(v, Tensor)), None)
        if x is None or x.ndim == 0 or output.ndim < 2 or len(x) != len(output) or bool(output.any()):
            return None
        return x.reshape(len(x), -1, *[1] * (output.ndim - 2))


def _widened(output: Tensor, samples: int, origin: int, current: Pass) -> Shared:
    """The output of a layer that was given no samples, with an entry for each."""
    wide = output.wide if isinstance(output, Shared) else output.expand(samples, *output.shape)
    return Shared.make(output, wide, origin, current)
