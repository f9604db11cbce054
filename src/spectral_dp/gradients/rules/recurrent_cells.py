"""Back-propagation through time in one layer and direction of a recurrent layer, the states of all steps being known.

    x   (T, B, n) input      h   (T, B, P) output      dh  (T, B, P) gradient of the loss with respect to it
    H   hidden size          P   size of the output: H, or proj_size of an LSTM

The gates of all steps are computed at once, and so is all of the backward pass that needs no gradient of a later step:
what is left for each step is a few products of ``(B, H)`` numbers and one matrix product. An LSTM has many such
numbers, so they are computed for a few steps at a time: they stay in the cache, and take no memory to speak of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

#: How many steps of an LSTM are prepared at a time.
BLOCK = 8


class States(NamedTuple):
    """States of some layers and directions, ``(layers * directions, B, ...)``, or of one, ``(B, ...)``.

    Attributes:
        h: The hidden states.
        c: The cell states of an LSTM; None of other layers.
    """

    h: Tensor
    c: Tensor | None

    def at(self, index: int) -> States:
        """Those of one layer and direction."""
        return States(self.h[index], None if self.c is None else self.c[index])


#: Weights with their widths, biases, input of the map, gradient of what comes out of it.
CellMap = tuple[tuple[tuple[str, int], ...], tuple[str, ...], Tensor, Tensor]


class Gates(NamedTuple):
    """What the back-propagation through a layer found.

    Attributes:
        maps: The dense maps inside, time first.
        input_gates: Gradient of the loss with respect to what the input weight gives, ``(T, B, G)``.
        dinitial: Gradients of the loss with respect to the states before the first step.
    """

    maps: list[CellMap]
    input_gates: Tensor
    dinitial: States


class Cell(ABC):
    """One layer in one direction.

    Args:
        weight_ih: ``(G, n)``.
        weight_hh: ``(G, P)``.
        bias_ih: ``(G,)``, or None.
        bias_hh: ``(G,)``, or None.
        weight_hr: ``(P, H)``, or None.
    """

    def __init__(
        self,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias_ih: Tensor | None = None,
        bias_hh: Tensor | None = None,
        weight_hr: Tensor | None = None,
    ) -> None:
        self.weight_ih, self.weight_hh, self.weight_hr = weight_ih, weight_hh, weight_hr
        self.bias_ih = weight_ih.new_zeros(len(weight_ih)) if bias_ih is None else bias_ih
        self.bias_hh = weight_hh.new_zeros(len(weight_hh)) if bias_hh is None else bias_hh

    @abstractmethod
    def back(self, x: Tensor, h: Tensor, dh: Tensor, initial: States, dfinal: States, is_there: Tensor | None) -> Gates:
        """Goes back through the steps.

        Args:
            x: As above.
            h: As above.
            dh: As above.
            initial: States before the first step.
            dfinal: Gradients of those after the last.
            is_there: Which steps there are, ``(T, B, 1)``; None for all. At a step that is not there the states stay.
        """

    def _one_map(self, x: Tensor, h: Tensor, initial: Tensor) -> tuple[Tensor, tuple[tuple[str, int], ...]]:
        """Input and state of each step side by side, ``(T, B, n + P)``: both meet the same gradient."""
        n, P = x.shape[2], h.shape[2]
        both = x.new_empty(*x.shape[:2], n + P)
        both[:, :, :n], both[:1, :, n:], both[1:, :, n:] = x, initial, h[:-1]
        return both, (("weight_ih", n), ("weight_hh", P))


class TanhCell(Cell):
    """``h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)``, or another function."""

    @staticmethod
    def slope(h: Tensor) -> Tensor:
        """The derivative of the function, from its value."""
        return 1 - h.square()

    def back(self, x: Tensor, h: Tensor, dh: Tensor, initial: States, dfinal: States, is_there: Tensor | None) -> Gates:
        slope, stays = self.slope(h), None
        if is_there is not None:
            slope, stays = slope * is_there, 1 - is_there
        dA, carried = torch.empty_like(h), dfinal.h
        for t in reversed(range(len(h))):
            dh_t = dh[t] + carried
            torch.mul(dh_t, slope[t], out=dA[t])
            carried = dA[t] @ self.weight_hh
            if stays is not None:
                carried = torch.addcmul(carried, dh_t, stays[t])
        both, weights = self._one_map(x, h, initial.h)
        return Gates([(weights, ("bias_ih", "bias_hh"), both, dA)], dA, States(carried, None))


class ReluCell(TanhCell):
    """The same with ``relu``."""

    @staticmethod
    def slope(h: Tensor) -> Tensor:
        return (h > 0).to(h.dtype)


class LSTMCell(Cell):
    """``c_t = f c_{t-1} + i g``, ``h_t = W_hr (o tanh(c_t))``, with ``W_hr`` the identity where there is none."""

    def back(self, x: Tensor, h: Tensor, dh: Tensor, initial: States, dfinal: States, is_there: Tensor | None) -> Gates:
        both, weights = self._one_map(x, h, initial.h)
        weight = torch.cat([self.weight_ih, self.weight_hh], dim=1)
        a = torch.addmm(self.bias_ih + self.bias_hh, both.flatten(0, 1), weight.T).unflatten(0, both.shape[:2])
        H = a.shape[2] // 4
        i, f, g, o = a.split(H, dim=2)
        for gate, function in ((i, torch.sigmoid_), (f, torch.sigmoid_), (g, torch.tanh_), (o, torch.sigmoid_)):
            function(gate)
        c_0, dc = initial.c, dfinal.c
        assert c_0 is not None
        assert dc is not None
        c = torch.mul(i, g)
        for t in range(len(c)):
            c[t].addcmul_(f[t], c[t - 1] if t else c_0)
        hidden = None if self.weight_hr is None else o * c.tanh()
        # In the place of the gates of a step comes their gradient, once they are not needed any more.
        dA, dprojected, carried = a, [], dfinal.h
        for steps in _blocks(len(c)):
            is_there_now = None if is_there is None else is_there[steps]
            before = _before(c[steps], c[steps.start - 1] if steps.start else c_0)
            dc_of_dh, keeps = self._slopes(a[steps], before, c[steps], is_there_now)
            for t in reversed(range(steps.start, steps.stop)):
                dh_t, k = dh[t] + carried, t - steps.start
                from_cell = dh_t if self.weight_hr is None else dh_t @ self.weight_hr
                dc = torch.addcmul(dc, from_cell, dc_of_dh[k])
                dA[t, :, : 3 * H].unflatten(1, (3, H)).mul_(dc[:, None])
                dA[t, :, 3 * H :].mul_(from_cell)
                carried = dA[t] @ self.weight_hh
                dc = dc * keeps[k]
                if self.weight_hr is not None:
                    dprojected.append(dh_t if is_there is None else dh_t * is_there[t])
                if is_there is not None:
                    carried = torch.addcmul(carried, dh_t, 1 - is_there[t])
        maps: list[CellMap] = [(weights, ("bias_ih", "bias_hh"), both, dA)]
        if hidden is not None:
            maps.append(((("weight_hr", H),), (), hidden, torch.stack(dprojected[::-1])))
        return Gates(maps, dA, States(carried, dc))

    @staticmethod
    def _slopes(gates: Tensor, before: Tensor, c: Tensor, is_there: Tensor | None) -> tuple[Tensor, Tensor]:
        """Replaces gates by what their gradients are multiples of: of dc by those of i, f and g, of dh by that of o.

        Returns by what dc is a multiple of dh, and what is kept of dc for the step before.
        """
        i, f, g, o = gates.chunk(4, dim=2)
        squashed = c.tanh()
        dc_of_dh = o * (1 - squashed.square())
        keeps = f.clone(memory_format=torch.contiguous_format)
        i_slope = g * i * (1 - i)
        g.copy_(i * (1 - g.square()))
        i.copy_(i_slope)
        f.copy_(before * f * (1 - f))
        o.copy_(squashed * o * (1 - o))
        if is_there is not None:
            gates.mul_(is_there)
            dc_of_dh, keeps = dc_of_dh * is_there, keeps * is_there + (1 - is_there)
        return dc_of_dh, keeps


class GRUCell(Cell):
    """``n = tanh(a_in + r a_hn)``, ``h_t = (1 - z) n + z h_{t-1}``: ``r`` multiplies the state's part of ``n``."""

    def back(self, x: Tensor, h: Tensor, dh: Tensor, initial: States, dfinal: States, is_there: Tensor | None) -> Gates:
        before, H = _before(h, initial.h), h.shape[2]
        from_input = x @ self.weight_ih.T + self.bias_ih
        from_state = before @ self.weight_hh.T + self.bias_hh
        r, z = (from_input[..., : 2 * H] + from_state[..., : 2 * H]).sigmoid_().split(H, dim=2)
        a_hn = from_state[..., 2 * H :]
        n = torch.addcmul(from_input[..., 2 * H :], r, a_hn).tanh_()
        dn_of_dh = (1 - z) * (1 - n.square())
        slopes = torch.cat([dn_of_dh * a_hn * r * (1 - r), (before - n) * z * (1 - z), dn_of_dh * r], dim=2)
        if is_there is not None:
            slopes, dn_of_dh, z = slopes * is_there, dn_of_dh * is_there, z * is_there + (1 - is_there)
        dA_state, totals, carried = slopes, torch.empty_like(h), dfinal.h
        for t in reversed(range(len(h))):
            dh_t = torch.add(dh[t], carried, out=totals[t])
            dA_state[t].unflatten(1, (3, H)).mul_(dh_t[:, None])
            carried = torch.addmm(dh_t * z[t], dA_state[t], self.weight_hh)
        dA_input = torch.cat([dA_state[..., : 2 * H], totals * dn_of_dh], dim=2)
        return Gates(
            [
                ((("weight_ih", x.shape[2]),), ("bias_ih",), x, dA_input),
                ((("weight_hh", H),), ("bias_hh",), before, dA_state),
            ],
            dA_input,
            States(carried, None),
        )


CELLS: dict[str, Callable[..., Cell]] = {
    "LSTM": LSTMCell,
    "GRU": GRUCell,
    "RNN_TANH": TanhCell,
    "RNN_RELU": ReluCell,
}


def _blocks(steps: int) -> Iterator[slice]:
    """The steps in blocks, the last first."""
    return (slice(start, min(start + BLOCK, steps)) for start in reversed(range(0, steps, BLOCK)))


def _before(h: Tensor, initial: Tensor) -> Tensor:
    """The state that each step starts from: ``h_{t-1}``."""
    return torch.cat([initial[None], h[:-1]])
