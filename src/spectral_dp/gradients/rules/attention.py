"""``nn.MultiheadAttention``: four dense maps (queries, keys, values, output) around an attention without parameters.

    q, k, v   (B, T, E) after their projections       context  (B, L, E) what the attention makes of them
    weights   (B, heads, L, S) of the attention

Torch's module computes its projections itself, so they cannot be recorded as layers. The layer is run again up to the
context, and the backward pass of the attention gives the gradients of ``q``, ``k`` and ``v``; each projection is then a
dense layer with tokens. Its dropout is drawn again from the generators as the forward pass found them; that it is the
same is checked by the output.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spectral_dp.gradients.recording.call import Call, OutputGradients
from spectral_dp.gradients.rules.dense_maps import DenseMap, DenseMaps, DenseMapsRule, InputGradients
from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import register_rule
from spectral_dp.gradients.rules.same_output import check_same_output
from spectral_dp.split_attention import added_mask

_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)
_PARAMETERS = {
    *(f"{name}_proj_weight" for name in ("in", "q", "k", "v")),
    *("in_proj_bias", "bias_k", "bias_v", "out_proj.weight", "out_proj.bias"),
}


class Inner(NamedTuple):
    """What goes into the attention: the leaves of its backward pass.

    Attributes:
        projected: Queries, keys and values.
        extra: ``bias_k`` and ``bias_v`` as every sample has them, ``(B, 1, E)`` each; empty where there are none.
        mask: A mask of real numbers as it was given; None where there is none whose gradient is needed.
    """

    projected: tuple[Tensor, Tensor, Tensor]
    extra: tuple[Tensor, ...]
    mask: Tensor | None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (*self.projected, *self.extra, *(() if self.mask is None else (self.mask,)))


class AttentionRule(DenseMapsRule[nn.MultiheadAttention]):
    """Rule of ``nn.MultiheadAttention``; coefficients have the parameters' shapes, unfiltered."""

    covers_parts: ClassVar[bool] = True
    needs_output: ClassVar[bool] = True

    #: Whether the output of the second run has been compared with that of the first.
    _is_checked = False

    def by_sample(self, outputs: Sequence[Tensor]) -> Tensor:
        return self._batch_first(_batched(outputs[0]))

    def open(self, call: Call, dA: OutputGradients) -> tuple[DenseMaps, InputGradients]:
        given = _SIGNATURE.bind(self.module, *call.args, **call.kwargs)
        given.apply_defaults()
        options = given.arguments
        inputs = tuple(self._samples_first(options[name]) for name in ("query", "key", "value"))
        inner = self._project(inputs, options["attn_mask"] if dA.needs(options["attn_mask"]) else None)
        replayed = call.random_state.replayed() if call.random_state is not None else nullcontext()
        with torch.enable_grad(), replayed:
            # The call tells whether there was dropout: the module may have been switched to another mode since.
            p = 0.0 if call.random_state is None else self.module.dropout
            context, weights = self._attend(inner, options, p)
        self._check(call, context.detach())
        dout, dcontext = self._output_gradient(dA.gradients[0], context)
        found = _gradients_of(inner.leaves, [(context, dcontext), (weights, (*dA.gradients, None)[1])])
        return self._maps(inputs, inner, context.detach(), dout, found), self._input_gradients(
            options, inner, found, dA
        )

    def _project(self, inputs: tuple[Tensor, ...], mask: Tensor | None) -> Inner:
        module, bias = self.module, self._value("in_proj_bias")
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        projected = [F.linear(x, w, b) for x, w, b in zip(inputs, self._projections(), biases, strict=True)]
        extra = [] if module.bias_k is None else [self._value("bias_k"), self._value("bias_v")]
        shared = [e.expand(len(inputs[0]), 1, -1).contiguous() for e in extra if e is not None]
        mask = None if mask is None else mask.to(self.dtype).clone()
        for leaf in (*projected, *shared, *(() if mask is None else (mask,))):
            leaf.requires_grad_()
        return Inner((projected[0], projected[1], projected[2]), tuple(shared), mask)

    def _attend(self, inner: Inner, options: dict[str, Any], p: float) -> tuple[Tensor, Tensor | None]:
        """Context, and the weights where they were asked for, as torch's function computes them with dropout ``p``."""
        module, (q, k, v) = self.module, inner.projected
        if inner.extra:
            k, v = (torch.cat([t, e], dim=1) for t, e in zip((k, v), inner.extra, strict=True))
        if module.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        mask = self._mask(inner, options, q, k)
        q, k, v = (t.unflatten(2, (module.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        if not options["need_weights"]:
            context, weights = F.scaled_dot_product_attention(q, k, v, mask, p), None
        else:
            scores = (q * math.sqrt(1 / q.shape[3])) @ k.mT
            weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = F.dropout(weights.flatten(0, 1), p).view_as(weights) if p else weights
            context = weights @ v
            weights = weights.mean(1) if options["average_attn_weights"] else weights
        return context.transpose(1, 2).flatten(2), weights

    def _mask(self, inner: Inner, options: dict[str, Any], q: Tensor, k: Tensor) -> Tensor | None:
        """Both masks as one to be added to the scores, ``(1 or B, 1 or heads, 1 or L, S)``."""
        attention, padding = options["attn_mask"] if inner.mask is None else inner.mask, options["key_padding_mask"]
        masks = []
        if attention is not None:
            attention = attention if attention.ndim == 3 else attention[None]
            heads = 1 if len(attention) == 1 else self.module.num_heads
            masks.append(added_mask(attention, q.dtype).unflatten(0, (-1, heads)))
        if padding is not None:
            masks.append(added_mask(padding, q.dtype)[:, None, None])
        if not masks:
            return None
        missing = k.shape[1] - masks[0].shape[3]  # what was appended to the keys is seen by all
        return F.pad(masks[0] if len(masks) == 1 else masks[0] + masks[1], (0, missing))

    def _check(self, call: Call, context: Tensor) -> None:
        """With dropout every time, otherwise once: the second run must give the output of the first."""
        if call.random_state is None and (self._is_checked or call.output is None):
            return
        recorded = None if call.output is None else self._batch_first(call.output)
        out = F.linear(context, self._weight("out_proj.weight"), self._value("out_proj.bias"))
        check_same_output(self.module, out, recorded)
        self._is_checked = True

    def _output_gradient(self, dout: Tensor | None, context: Tensor) -> tuple[Tensor, Tensor]:
        dout = torch.zeros_like(context) if dout is None else self._samples_first(dout)
        return dout, dout @ self._weight("out_proj.weight")

    def _maps(
        self, inputs: tuple[Tensor, ...], inner: Inner, context: Tensor, dout: Tensor, found: list[Tensor]
    ) -> DenseMaps:
        names = [f"{name}_proj_weight" for name in ("in in in" if self._is_packed else "q k v").split()]
        biases = () if self.module.in_proj_bias is None else ("in_proj_bias",)
        if self._is_packed and _are_one(inputs):
            names, inputs, found_maps = names[:1], inputs[:1], [torch.cat(found[:3], dim=2)]
        else:
            found_maps = found[:3]
        maps = [
            DenseMap(((name, x.shape[2]),), biases, x, d) for name, x, d in zip(names, inputs, found_maps, strict=True)
        ]
        out_bias = () if self.module.out_proj.bias is None else ("out_proj.bias",)
        maps.append(DenseMap((("out_proj.weight", context.shape[2]),), out_bias, context, dout))
        extra = zip(("bias_k", "bias_v"), found[3 : 3 + len(inner.extra)], strict=False)
        return DenseMaps(tuple(maps), {name: z[:, None] for name, z in extra})

    def _input_gradients(
        self, options: dict[str, Any], inner: Inner, found: list[Tensor], dA: OutputGradients
    ) -> InputGradients:
        gradients: InputGradients = []
        for name, w, d in zip(("query", "key", "value"), self._projections(), found, strict=False):
            if dA.needs(options[name]):
                gradients.append((options[name], self._samples_first(d @ w)))  # and back: the same exchange
        if inner.mask is not None:
            gradients.append((options["attn_mask"], found[-1]))
        return gradients

    @property
    def _is_packed(self) -> bool:
        return self.module.in_proj_weight is not None

    def _projections(self) -> tuple[Tensor, ...]:
        if self._is_packed:
            return self._weight("in_proj_weight").chunk(3)
        return tuple(self._weight(f"{name}_proj_weight") for name in "qkv")

    def _weight(self, name: str) -> Tensor:
        return self.module.get_parameter(name).detach().to(self.dtype)

    def _value(self, name: str) -> Tensor | None:
        parts = dict(self.module.named_parameters(remove_duplicate=False))  # by all its names, if one is shared
        return self._weight(name) if name in parts else None

    def _samples_first(self, t: Tensor) -> Tensor:
        return self._batch_first(_batched(t)).to(self.dtype)

    def _batch_first(self, t: Tensor) -> Tensor:
        return t if self.module.batch_first else t.transpose(0, 1)


@register_rule(nn.MultiheadAttention)
def attention_rule(module: nn.MultiheadAttention, config: LayerConfig) -> AttentionRule | FallbackRule:
    """The rule of an attention as torch wrote it; the fallback if a part was exchanged or has other parameters."""
    names = dict(module.named_parameters()).keys()
    is_plain = type(module.out_proj).__module__.startswith("torch.nn.modules.") and names <= _PARAMETERS
    return (AttentionRule if is_plain else FallbackRule)(module, config)


def _batched(t: Tensor) -> Tensor:
    if t.ndim != 3:
        raise ValueError("MultiheadAttention was called with one unbatched sample: add x[None]")
    return t


def _are_one(tensors: tuple[Tensor, ...]) -> bool:
    """Whether these are the same numbers in the same place: the queries of a self-attention are its keys."""
    return len({(t.data_ptr(), t.shape, t.stride()) for t in tensors}) == 1


def _gradients_of(leaves: tuple[Tensor, ...], outputs: list[tuple[Tensor | None, Tensor | None]]) -> list[Tensor]:
    used = [(out, d.to(out.dtype)) for out, d in outputs if out is not None and d is not None]
    gradients = torch.autograd.grad([out for out, _ in used], leaves, [d for _, d in used], materialize_grads=True)
    return list(gradients)
