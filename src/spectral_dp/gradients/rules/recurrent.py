"""Recurrent layers: ``nn.LSTM``, ``nn.GRU``, ``nn.RNN``. Their gates are dense maps of what came in and of the state.

    x_t      input of a layer at step t             h_t, c_t   its states
    a_t      the gates before their functions       dA_t       gradient of the loss with respect to a_t

    weight_ih: g_b = sum_t dA_t (x) x_t             weight_hh: g_b = sum_t dA_t (x) h_{t-1}        biases: sum_t dA_t

The states of the top layer are its output, those of layers below are computed once more. Then the gates of all steps
are one matrix product, and only the back-propagation through time goes step by step (``recurrent_cells.py``). The
dropout between layers is drawn again from the generators as the forward pass found them; that it is the same is checked
by the output.

Inside, time comes first: ``(T, B, ...)``. A reverse direction is a forward one on the reversed sequence, and a packed
batch is one with padding after the end of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from spectral_dp.gradients.recording.call import Call, OutputGradients
from spectral_dp.gradients.rules.dense_maps import DenseMap, DenseMaps, DenseMapsRule, InputGradients
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.recurrent_cells import CELLS, Cell, Gates, States
from spectral_dp.gradients.rules.registry import register_rule
from spectral_dp.gradients.rules.same_output import check_same_output

Sequences = Tensor | PackedSequence
_NATIVE = {"LSTM": torch._VF.lstm, "GRU": torch._VF.gru, "RNN_TANH": torch._VF.rnn_tanh, "RNN_RELU": torch._VF.rnn_relu}


class Steps(NamedTuple):
    """Which steps of a batch of sequences there are.

    Attributes:
        is_there: ``(T, B, 1)``, one or zero; None where all sequences are equally long.
        reversed: ``(T, B)``, at each step the step that it is in the reverse direction; None as above.
    """

    is_there: Tensor | None
    reversed: Tensor | None

    def flipped(self, t: Tensor) -> Tensor:
        """Each sequence ``(T, B, n)`` reversed, padding at its end left there."""
        return t.flip(0) if self.reversed is None else t.gather(0, self.reversed[..., None].expand_as(t))


class LayerInput(NamedTuple):
    """Input of one of the layers, and the dropout mask that was put on it; None where there was none."""

    x: Tensor
    mask: Tensor | None


@register_rule(nn.LSTM, nn.GRU, nn.RNN)
class RecurrentRule(DenseMapsRule[nn.RNNBase]):
    """Rule of ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``; coefficients have the parameters' shapes, unfiltered."""

    needs_output: ClassVar[bool] = True

    def __init__(self, module: nn.RNNBase, config: LayerConfig) -> None:
        self._directions = 2 if module.bidirectional else 1
        super().__init__(module, config)

    def by_sample(self, outputs: Sequence[Tensor]) -> Tensor:
        last = outputs[1]  # the states after the last step: (layers * directions, B, n), however the input came
        if last.ndim != 3:
            raise ValueError(f"{type(self.module).__name__} was called with one unbatched sequence: add x[None]")
        return last.transpose(0, 1)

    def open(self, call: Call, dA: OutputGradients) -> tuple[DenseMaps, InputGradients]:
        given = {**dict(zip(("input", "hx"), call.args, strict=False)), **call.kwargs}
        x, initial = self._native(given["input"]), self._initial(given["input"], given.get("hx"))
        inputs, outputs = self._run(x, initial, call)
        steps = _steps(x)
        dout, dfinal = self._output_gradients(x, outputs[-1], initial, dA)
        maps: list[DenseMap] = []
        dinitial: list[States] = []
        for layer in reversed(range(self.module.num_layers)):
            directions = self._layer(layer, steps, inputs[layer].x, outputs[layer], initial, dout, dfinal)
            maps = [each for direction in directions for each in self._maps(*direction)] + maps
            dinitial = [gates.dinitial for _, gates in directions] + dinitial
            if layer or dA.needs(_data(given["input"])):
                dout = self._input_gradient(directions, steps)
            if (mask := inputs[layer].mask) is not None:
                dout = dout * mask
        gradients: InputGradients = []
        if dA.needed:
            if dA.needs(_data(given["input"])):
                gradients = [(_data(given["input"]), self._as_given(given["input"], dout))]
            if (hx := given.get("hx")) is not None:
                if self.module.mode == "LSTM":
                    gradients += [(hx[0], torch.stack([s.h for s in dinitial]))]
                    gradients += [(hx[1], torch.stack([s.c for s in dinitial if s.c is not None]))]
                else:
                    gradients += [(hx, torch.stack([s.h for s in dinitial]))]
        return DenseMaps(tuple(maps), {}), gradients

    def _layer(
        self, layer: int, steps: Steps, x: Tensor, out: Tensor, initial: States, dout: Tensor, dfinal: States
    ) -> list[tuple[int, Gates]]:
        """What the back-propagation through a layer finds, for each direction with its number."""
        found = []
        parts = [t.chunk(self._directions, dim=2) for t in (out, dout)]
        for direction, (states, dstates) in enumerate(zip(*parts, strict=True)):
            turn = steps.flipped if direction else _as_it_is
            index = layer * self._directions + direction
            gates = self._cell(index).back(
                turn(x), turn(states), turn(dstates), initial.at(index), dfinal.at(index), steps.is_there
            )
            found.append((index, gates))
        return found

    def _maps(self, index: int, gates: Gates) -> list[DenseMap]:
        return [
            DenseMap(
                tuple((self._name(name, index), width) for name, width in weights),
                tuple(self._name(name, index) for name in biases if self.module.bias),
                inner.transpose(0, 1),
                dA.transpose(0, 1),
            )
            for weights, biases, inner, dA in gates.maps
        ]

    def _input_gradient(self, directions: list[tuple[int, Gates]], steps: Steps) -> Tensor:
        parts = [gates.input_gates @ self._weights(index)["weight_ih"] for index, gates in directions]
        return parts[0] if len(parts) == 1 else parts[0] + steps.flipped(parts[1])

    def _run(self, x: Sequences, initial: States, call: Call) -> tuple[list[LayerInput], list[Tensor]]:
        """Inputs and outputs of all layers, ``(T, B, ...)`` each."""
        module = self.module
        recorded = self._recorded_output(x, call)
        # The call tells whether there was dropout: the module may have been switched to another mode since.
        masks_differ = call.random_state is not None and module.dropout > 0 and module.num_layers > 1
        inputs: list[LayerInput] = []
        outputs: list[Tensor] = []
        with call.random_state.replayed() if call.random_state is not None else nullcontext():
            for layer in range(module.num_layers):
                mask = None
                if masks_differ and layer:
                    mask = F.dropout(torch.ones_like(_data(x)), module.dropout)
                    x, mask = _with_data(x, _data(x) * mask), _padded(_with_data(x, mask))
                inputs.append(LayerInput(_padded(x), mask))
                is_top = layer == module.num_layers - 1 and not masks_differ
                is_known = is_top and recorded is not None and _data(recorded).dtype == self.dtype
                x = recorded if is_known and recorded is not None else self._run_layer(layer, x, initial)
                outputs.append(_padded(x))
        if masks_differ:
            check_same_output(module, _data(x), None if recorded is None else _data(recorded))
        return inputs, outputs

    def _run_layer(self, layer: int, x: Sequences, initial: States) -> Sequences:
        rows = slice(layer * self._directions, (layer + 1) * self._directions)
        weights = [w for index in range(*rows.indices(len(initial.h))) for w in self._weights(index).values()]
        start = [states[rows] for states in initial if states is not None]
        if isinstance(x, PackedSequence) and x.sorted_indices is not None:
            start = [states.index_select(1, x.sorted_indices) for states in start]
        states: Any = start if self.module.mode == "LSTM" else start[0]
        options = (weights, self.module.bias, 1, 0.0, False, self.module.bidirectional)
        native: Any = _NATIVE[self.module.mode]
        if isinstance(x, PackedSequence):
            return _with_data(x, native(x.data, x.batch_sizes, states, *options)[0])
        out: Tensor = native(x, states, *options, False)[0]
        return out

    def _weights(self, index: int) -> dict[str, Tensor]:
        """Of one layer in one direction, by the first part of their names, in the order that torch has them in."""
        names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if self.module.bias else [])]
        names += ["weight_hr"] if self.module.proj_size else []
        return {name: getattr(self.module, self._name(name, index)).detach().to(self.dtype) for name in names}

    def _name(self, name: str, index: int) -> str:
        layer, direction = divmod(index, self._directions)
        return f"{name}_l{layer}{'_reverse' if direction else ''}"

    def _cell(self, index: int) -> Cell:
        return CELLS[self.module.mode](**self._weights(index))

    def _native(self, x: Sequences) -> Sequences:
        """As torch's kernels take it: packed, or with time first."""
        if isinstance(x, PackedSequence):
            return _with_data(x, x.data.to(self.dtype))
        if x.ndim != 3:
            raise ValueError(f"{type(self.module).__name__} was called with one unbatched sequence: add x[None]")
        return self._time_first(x.to(self.dtype))

    def _time_first(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1) if self.module.batch_first else t

    def _as_given(self, x: Sequences, t: Tensor) -> Tensor:
        """``(T, B, n)`` in the layout of an input."""
        if not isinstance(x, PackedSequence):
            return t.transpose(0, 1) if self.module.batch_first else t
        if x.sorted_indices is not None:
            t = t.index_select(1, x.sorted_indices)
        return torch.cat([step[:count] for step, count in zip(t, x.batch_sizes.tolist(), strict=True)])

    def _initial(self, x: Sequences, given: Any) -> States:
        """States before the first step, ``(layers * directions, B, ...)``, samples in the order of the records."""
        module = self.module
        if given is not None:
            h, c = given if module.mode == "LSTM" else (given, None)
            return States(h.to(self.dtype), None if c is None else c.to(self.dtype))
        samples = int(x.batch_sizes[0]) if isinstance(x, PackedSequence) else x.shape[0 if module.batch_first else 1]
        like = _data(x)
        rows = (module.num_layers * self._directions, samples)
        h = like.new_zeros(*rows, module.proj_size or module.hidden_size, dtype=self.dtype)
        return States(h, like.new_zeros(*rows, module.hidden_size, dtype=self.dtype) if module.mode == "LSTM" else None)

    def _recorded_output(self, x: Sequences, call: Call) -> Sequences | None:
        if call.output is None:
            return None
        return _with_data(x, call.output) if isinstance(x, PackedSequence) else self._time_first(call.output)

    def _output_gradients(
        self, x: Sequences, out: Tensor, initial: States, dA: OutputGradients
    ) -> tuple[Tensor, States]:
        """Gradients of the outputs of all steps and of the last states; zeros where the loss does not depend on one."""
        dout, *dstates = (None if d is None else d.to(self.dtype) for d in dA.gradients)
        if dout is None:
            dout = torch.zeros_like(out)
        elif isinstance(x, PackedSequence):
            dout = _padded(_with_data(x, dout))
        else:
            dout = self._time_first(dout)
        dh, dc = (*dstates, None)[:2]
        dh = torch.zeros_like(initial.h) if dh is None else dh
        if initial.c is not None and dc is None:
            dc = torch.zeros_like(initial.c)
        return dout, States(dh, dc)


def _data(x: Sequences) -> Tensor:
    return x.data if isinstance(x, PackedSequence) else x


def _with_data(x: Sequences, data: Tensor) -> Sequences:
    return x._replace(data=data) if isinstance(x, PackedSequence) else data


def _padded(x: Sequences) -> Tensor:
    """``(T, B, n)``, samples in the order of the records."""
    return pad_packed_sequence(x)[0] if isinstance(x, PackedSequence) else x


def _steps(x: Sequences) -> Steps:
    if not isinstance(x, PackedSequence):
        return Steps(None, None)
    padded, lengths = pad_packed_sequence(x)
    lengths, step = lengths.to(padded.device), torch.arange(len(padded), device=padded.device)[:, None]
    is_there = step < lengths
    return Steps(is_there[..., None].to(padded.dtype), torch.where(is_there, lengths - 1 - step, step))


def _as_it_is(t: Tensor) -> Tensor:
    return t
