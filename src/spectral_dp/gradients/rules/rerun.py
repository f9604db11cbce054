"""A module is run again as its recorded forward pass ran it, for each sample alone, and is left as it was."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spectral_dp.errors import SpectralDPError
from spectral_dp.gradients.recording.call import Call
from spectral_dp.gradients.rules.draws import Draws, GivenDraws

NamedTensors = dict[str, Tensor]


class NotPerSampleError(SpectralDPError, RuntimeError):
    """The output of a module does not have one entry a sample."""


class Rerun:
    """A recorded call of a module, to be run again.

    Args:
        module: The module.
        call: What it was called with. Tensors as long as the batch are taken to hold one entry a sample.
        samples: How many there are; None where they share all that the module was called with.
        dtype: What to compute in.

    The methods take the parameters that are trained, by name, and the rest of the module's state: other parameters, and
    buffers, which a run may write. A call that drew random numbers is first run :meth:`together`.
    """

    def __init__(self, module: nn.Module, call: Call, samples: int | None, dtype: torch.dtype) -> None:
        self._module = WithoutHooks(module)
        self._samples = samples or 0
        self._random_state = call.random_state
        self._drawn: list[Tensor] | None = None
        self._leaves, self._structure = tree_flatten((call.args, dict(call.kwargs)))
        self._is_batched = [isinstance(v, Tensor) and v.ndim > 0 and len(v) == samples for v in self._leaves]
        self._leaves = [_prepared(v, dtype) for v in self._leaves]
        self._inputs = [v for v, is_batched in zip(self._leaves, self._is_batched, strict=True) if is_batched]

    @property
    def draws(self) -> bool:
        """Whether the recorded call drew random numbers."""
        return self._random_state is not None

    def together(self, trained: NamedTensors, rest: NamedTensors) -> Tensor:
        """Output of the whole batch, with the random numbers that the recorded forward pass drew."""
        if self._random_state is None:
            return self._forward(trained, _copies(rest), self._inputs)
        draws = Draws()
        with self._random_state.replayed(), draws:
            output = self._forward(trained, _copies(rest), self._inputs)
        self._drawn = draws.drawn
        return output

    def side_by_side(self, trained: NamedTensors, rest: NamedTensors, dA: Tensor) -> tuple[NamedTensors, Tensor]:
        """Per-sample gradients of ``<output, dA>`` and the outputs of each sample alone, all at once."""
        randomness = "error" if self._drawn is None else "different"
        of_each = vmap(grad(self._of_sample, has_aux=True), in_dims=(None, None, 0, 0), randomness=randomness)
        with self._given_again(None):
            return of_each(trained, rest, self._inputs, dA)

    def of_all(self, trained: NamedTensors, rest: NamedTensors, dA: Tensor) -> tuple[NamedTensors, Tensor]:
        """Per-sample gradients of ``<output, dA_b>`` where samples share the output, and that output."""
        with nullcontext() if self._random_state is None else self._random_state.replayed():
            output, pull_back, *_ = vjp(lambda parameters: self._forward(parameters, _copies(rest), []), trained)
        return vmap(pull_back)(dA)[0], output

    def one_by_one(self, trained: NamedTensors, rest: NamedTensors, dA: Tensor) -> tuple[NamedTensors, Tensor]:
        """The same in a loop with plain autograd, which runs what ``torch.func`` cannot."""
        rows = []
        for b in range(self._samples):
            parameters = {name: p.clone().requires_grad_() for name, p in trained.items()}
            with torch.enable_grad(), self._given_again(b):
                value, output = self._of_sample(parameters, _copies(rest), [v[b] for v in self._inputs], dA[b])
                gradients = torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)
            rows.append((*gradients, output.detach()))
        *columns, outputs = (torch.stack(column) for column in zip(*rows, strict=True))
        return dict(zip(trained, columns, strict=True)), outputs

    @contextmanager
    def _given_again(self, sample: int | None) -> Iterator[None]:
        """What the batch drew is given again, to each sample its own part; the generators are left as they are."""
        if self._drawn is None or self._random_state is None:
            yield
            return
        with self._random_state.replayed(), GivenDraws(self._drawn, self._samples, sample):
            yield

    def _of_sample(
        self, trained: NamedTensors, rest: NamedTensors, inputs: list[Tensor], dA_b: Tensor
    ) -> tuple[Tensor, Tensor]:
        output = self._forward(trained, rest, [v[None] for v in inputs])
        if output.shape != (1, *dA_b.shape):  # without numbers: the second may have the realised batch size in it
            raise NotPerSampleError(
                f"{type(self._module.module).__name__}, given one sample, does not return the shape that it returns "
                "for each row of a batch: keep samples in the first dimension of its inputs and of its output"
            )
        return (output * dA_b[None]).sum(), output[0]

    def _forward(self, trained: NamedTensors, rest: NamedTensors, inputs: list[Tensor]) -> Tensor:
        remaining = iter(inputs)
        leaves = [next(remaining) if b else v for v, b in zip(self._leaves, self._is_batched, strict=True)]
        state = {f"module.{name}": value for name, value in {**rest, **trained}.items()}
        output = functional_call(self._module, state, tree_unflatten(leaves, self._structure))
        return next(t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point())


class WithoutHooks(nn.Module):
    """A module without the hooks on itself: what was recorded is its input after them, and its output before them.

    Forward pre-hooks still run, for what they do to the module (``weight_norm`` computes its weight in one). What they
    make of the input was recorded, so here they get a copy, and what they return is not used. Hooks of submodules are
    part of the forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        for number, hook in self.module._forward_pre_hooks.items():
            copies = tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, (args, dict(kwargs)))
            hook(self.module, *(copies if number in self.module._forward_pre_hooks_with_kwargs else copies[:1]))
        return self.module.forward(*args, **kwargs)


def is_plain_norm(module: nn.Module, names: Collection[str], eps: object) -> bool:
    """Returns whether a layer has these parameters alone, each a vector, an epsilon, no parts, and one argument."""
    parameters = dict(module.named_parameters())
    has_these = parameters.keys() == set(names) and all(p.ndim == 1 for p in parameters.values())
    has_one_argument = len(inspect.signature(module.forward).parameters) == 1
    return has_these and isinstance(eps, float) and not list(module.children()) and has_one_argument


def output_with(module: nn.Module, parameters: NamedTensors, x: Tensor, *, training: bool) -> Any:
    """Returns what a layer gives with other numbers for its parameters; None if it cannot be run so."""
    state = {f"module.{name}": value for name, value in parameters.items()}
    try:
        with torch.no_grad(), left_as_it_was(module):
            return functional_call(WithoutHooks(module.train(training)), state, ((x,), {}))
    except Exception:  # it takes other arguments, or numbers of other shapes
        return None


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Undoes what runs of a module do to its attributes, and lets spectral norms use the vectors they have.

    In training, a spectral norm moves its vectors ``u`` and ``v`` and then uses them. To move them again would give
    other weights than the recorded forward pass had.
    """
    attributes = [(vars(part), dict(vars(part))) for part in module.modules()]
    lists = [(v, list(v)) for _, before in attributes for v in before.values() if isinstance(v, list)]
    dicts = [(v, dict(v)) for _, before in attributes for v in before.values() if isinstance(v, dict)]
    hooks = [hook for part in module.modules() for hook in part._forward_pre_hooks.values()]
    norms: list[Any] = [norm for norm in (*hooks, *module.modules()) if isinstance(norm, SpectralNorm | _SpectralNorm)]
    iterations = [(norm, norm.n_power_iterations) for norm in norms if hasattr(norm, "n_power_iterations")]
    cached, parametrize._cache_enabled = parametrize._cache_enabled, 0  # else weights would not depend on parameters
    try:
        for norm, _ in iterations:
            norm.n_power_iterations = 0
        yield
    finally:
        parametrize._cache_enabled = cached
        for norm, count in iterations:
            norm.n_power_iterations = count
        for now, before in (*attributes, *dicts):
            if any(now.get(key) is not value for key, value in before.items()) or len(now) != len(before):
                now.clear()
                now.update(before)
        for items, known in lists:
            items[:] = known


def _prepared(value: Any, dtype: torch.dtype) -> Any:
    """A copy: the module may change it in place, and the backward pass that is under way still needs the original."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(dtype if value.is_floating_point() else value.dtype, copy=True)


def _copies(state: NamedTensors) -> NamedTensors:
    return {name: value.clone() for name, value in state.items()}
