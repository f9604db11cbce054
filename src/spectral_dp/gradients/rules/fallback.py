"""Any other module: its per-sample gradients by running it again, one sample at a time, under ``torch.func``.

Exact for every module that treats samples independently, but slower than a rule of its own. While it works it holds
what ``B`` runs of the module hold, and from then until the clipped sum ``B`` times the module's parameters.

Random numbers, such as dropout masks, are those that the recorded forward pass drew, each sample's its own
(``draws.py``). Where the outputs do not show that they are the same, the module is refused.
"""

from __future__ import annotations

import math
import warnings
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from spectral_dp.gradients.recording.call import Call
from spectral_dp.gradients.rules.draws import CannotRepeatError
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import differences
from spectral_dp.gradients.rules.rerun import NamedTensors, NotPerSampleError, Rerun, left_as_it_was
from spectral_dp.gradients.rules.rule import Rule

#: How far (relative to the largest) outputs of one sample alone may be from those in its batch, computed alike.
_ALONE = 1e-3
#: And from those of the recorded forward pass, which may have been computed in lower precision.
_AS_RECORDED = 0.1

_PUT_OUTSIDE = ", or set its dropout to zero and put an nn.Dropout before or behind the module"

_warned: set[tuple[type[nn.Module], str]] = set()


class FallbackRule(Rule[nn.Module]):
    """Rule of a module without one; covers the parameters of its submodules too.

    Its recorded input is a :class:`Call`, and ``dA`` belongs to the module's (first) output tensor. Tensor arguments
    whose first dimension is the batch size are taken to hold one entry a sample: keep what samples share in buffers. A
    module that gives a sample another output when it is run again, alone, than in its batch is refused.
    """

    covers_parts: ClassVar[bool] = True
    needs_output: ClassVar[bool] = True

    def __init__(self, module: nn.Module, config: LayerConfig) -> None:
        super().__init__(module, config)
        different = differences(module)
        self._warn_once(
            f"no rule for {self._name}{f', which has {different} of its own' if different else ''}: its "
            "per-sample gradients are computed by running it again under torch.func, which is exact but slower. "
            "Register a rule for it (spectral_dp.gradients.register_rule), or use standard layers for its parameters"
        )

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    @property
    def _unknown_draws(self) -> str:
        return (
            f"{self._name} draws random numbers, and whether it drew the same when it was run again cannot be told "
            f"because its output was changed in place: leave it as it is{_PUT_OUTSIDE}"
        )

    def input_of(self, call: Call) -> Call:
        return call

    def form(self, x: Call, dA: Tensor) -> dict[str, Tensor]:
        trained, rest = self._state(x)
        if len(dA) == 0 or not trained:
            return {name: p.new_zeros(0, *p.shape) for name, p in trained.items()}
        if x.is_shared:
            return self._form_shared(x, dA.to(self.dtype), trained, rest)
        with left_as_it_was(self.module):
            run = Rerun(self.module, x, len(dA), self.dtype)
            try:
                together = run.together(trained, rest)
                gradients, alone = self._alone(run, trained, rest, dA.to(self.dtype))
            except CannotRepeatError as error:
                raise RuntimeError(f"{self._name} was run again, but {error}{_PUT_OUTSIDE}") from error
        if x.random_state is not None:
            if x.output is None:
                raise RuntimeError(self._unknown_draws)
            recorded = x.output.to(self.dtype)
        else:
            recorded = together if x.output is None or x.output.dtype != self.dtype else x.output
        differ = _differ(alone, together, _ALONE) | _differ(alone, recorded, _AS_RECORDED)
        if int(differ.sum()) > max(1, len(differ) // 8):
            if getattr(self.module, "batch_first", True) is False:
                raise RuntimeError(
                    f"{self._name} was made with batch_first=False, so samples are not in the first dimension of its "
                    "input: make it with batch_first=True, and give it (samples, steps, features)"
                )
            if x.random_state is not None:
                raise RuntimeError(
                    f"{self._name} draws random numbers, and those of a sample could not be told from the others of "
                    "its batch when it was run again: let its dropout act on tensors with samples in the first "
                    f"dimension{_PUT_OUTSIDE}"
                )
            raise RuntimeError(
                f"{self._name} gives a sample another output when it is run again, alone, than in its batch: it mixes "
                "them, draws random numbers, remembers earlier forward passes (a counter, a hidden state), or was "
                "given an argument that samples share and that is as long as the batch (keep it in a buffer). Build it "
                "from standard layers, or register a rule for it (spectral_dp.gradients.register_rule)"
            )
        if not bool(differ.any()):
            return gradients
        # A few samples only: numbers so large that rounding decides. No record may stop a run; these count as zero.
        return {name: g.masked_fill(differ.view(-1, *[1] * (g.ndim - 1)), math.nan) for name, g in gradients.items()}

    def _form_shared(self, x: Call, dA: Tensor, trained: NamedTensors, rest: NamedTensors) -> dict[str, Tensor]:
        """Of a module that was given no samples, such as one that returns a table: it is run once for all of them."""
        args, kwargs = tree_map(lambda v: v[0] if isinstance(v, Tensor) else v, (x.args, dict(x.kwargs)))
        with left_as_it_was(self.module):
            run = Rerun(self.module, x._replace(args=args, kwargs=kwargs), None, self.dtype)
            gradients, output = run.of_all(trained, rest, dA)
        if x.output is None and x.random_state is not None:
            raise RuntimeError(self._unknown_draws)
        if x.output is not None and bool(_differ(output[None], x.output[:1].to(self.dtype), _AS_RECORDED).any()):
            raise RuntimeError(
                f"{self._name} gives another output when it is run again: it draws random numbers or remembers earlier "
                "forward passes. Build it from standard layers, or register a rule for it "
                "(spectral_dp.gradients.register_rule)"
            )
        return gradients

    def _state(self, call: Call) -> tuple[NamedTensors, NamedTensors]:
        """The parameters that are trained, and the rest; buffers as the forward pass left them, in copies."""
        rest = {name: p.detach().to(self.dtype) for name, p in self.parameters().items()}
        trained = {name: rest.pop(name) for name, p in self.parameters().items() if p.requires_grad}
        for name, b in self.module.named_buffers():
            value = call.buffers.get(name, b).detach().clone()
            is_half = value.is_floating_point() and value.dtype.itemsize < 4
            rest[name] = value.to(self.dtype) if is_half else value
        return trained, rest

    def _alone(self, run: Rerun, trained: NamedTensors, rest: NamedTensors, dA: Tensor) -> tuple[NamedTensors, Tensor]:
        try:
            return run.side_by_side(trained, rest, dA)
        except (NotPerSampleError, CannotRepeatError):
            raise
        except Exception as error:  # all that a module may do and torch.func cannot
            if "random" in str(error) and not run.draws:
                raise RuntimeError(
                    f"{self._name} draws random numbers in its forward pass, so running it again gives another result: "
                    "move its dropout into an nn.Dropout of the model, or set it to zero"
                ) from error
        # Not within the handler: torch's message has the realised batch size in it, which is private.
        try:
            result = run.one_by_one(trained, rest, dA)
        except (NotPerSampleError, CannotRepeatError):
            raise
        except Exception as error:
            raise RuntimeError(
                f"cannot run {self._name} one sample at a time ({error}): build it from standard layers, or register a "
                "rule for it (spectral_dp.gradients.register_rule)"
            ) from error
        self._warn_once(
            f"torch.func cannot run the samples of {self._name} side by side: they are run one after the other, which "
            "is exact but much slower. Build it from standard layers, or register a rule for it "
            "(spectral_dp.gradients.register_rule)"
        )
        return result

    def _warn_once(self, message: str) -> None:
        if (key := (type(self.module), message.split(":")[0])) not in _warned:
            _warned.add(key)
            warnings.warn(message, stacklevel=3)


def _differ(alone: Tensor, others: Tensor, tolerance: float) -> Tensor:
    """Which samples ``(B,)`` two ways to compute the same outputs disagree on, where they are finite.

    Each is measured by its own outputs, or by those of an ordinary sample if these are larger: one huge record must not
    hide what happens to the others.
    """
    if alone.shape != others.shape or not alone.numel():
        return torch.full((len(alone),), alone.shape != others.shape, device=alone.device)
    finite = alone.isfinite() & others.isfinite()
    difference, largest = (
        t.where(finite, torch.zeros_like(t)).abs().flatten(1).amax(1) for t in (alone - others, others)
    )
    return difference > tolerance * largest.maximum(largest.median())
