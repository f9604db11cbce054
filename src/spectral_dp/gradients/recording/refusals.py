"""What cannot be recorded is refused, with words that name the fix."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spectral_dp.gradients.recording.shared import Shared

_ON_EMPTY_BATCHES = (
    "The batch is empty, as Poisson batches may be, and the model cannot take it. It is a step all the same, of noise "
    "alone: call optimizer.step() for it without a forward and a backward pass (if len(x) == 0: optimizer.step())"
)


def check_called_as_it_is(module: nn.Module, trained: Collection[nn.Parameter]) -> None:
    """What replaces parameters, or runs a module on something else than the batch, has another gradient."""
    name = type(module).__name__
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"{name} has trained parameters and was called within a transform of torch.func (vmap, grad, jvp), where "
            "its per-sample gradients cannot be recorded: call it on the whole batch outside of the transform, or "
            "freeze it"
        )
    own = set(map(id, module._parameters.values()))
    if any(id(p) not in own for p in trained) and not set(map(id, trained)) <= set(map(id, module.parameters())):
        raise RuntimeError(
            f"the trained parameters of {name} were replaced by other tensors while it was called, as "
            "torch.func.functional_call does, so its gradient is not that of its own parameters: call the module "
            "itself, compute its weight by torch.nn.utils.parametrize, or freeze its parameters"
        )


def explain_empty_batch() -> None:
    """Adds to the error that is under way, if any, what to do about batches that a model cannot take."""
    if (error := sys.exception()) is not None and _ON_EMPTY_BATCHES not in getattr(error, "__notes__", ()):
        error.add_note(_ON_EMPTY_BATCHES)


def is_for_inputs_only() -> bool:
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


def refuse_shared(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises an error if a layer whose backward pass is taken over was given what samples share."""
    if any(isinstance(v, Shared) for v in tree_leaves((args, dict(kwargs)))):
        raise RuntimeError(
            f"{type(module).__name__} was given a tensor that all samples share (made of a parameter that a module "
            "holds itself, or by a layer that was given no samples), so their gradients cannot be told apart in it: "
            "give it one entry for each sample, such as x.expand(len(batch), -1, -1), with samples in the first "
            "dimension (a mask of an attention: mask.repeat(len(batch) * heads, 1, 1))"
        )


def refuse_dependence(what: str) -> Callable[[Tensor], None]:
    """Returns a hook that raises an error when the backward pass comes to a tensor that is not recorded."""

    def refuse(_: Tensor) -> None:
        raise RuntimeError(
            f"the loss depends {what}, whose gradient is not recorded: use the first output only, "
            "compute auxiliary losses from it outside of the module, or register a rule"
        )

    return refuse
