"""Back-propagation through time by hand, against autograd."""

import pytest
import torch
from torch import nn

from spectral_dp.gradients.rules.recurrent_cells import BLOCK, CELLS, States

T, B, N, H = 2 * BLOCK + 3, 3, 4, 6  # more than two blocks, the last not full
LAYERS = {
    "LSTM": lambda: nn.LSTM(N, H),
    "GRU": lambda: nn.GRU(N, H),
    "RNN_TANH": lambda: nn.RNN(N, H),
    "RNN_RELU": lambda: nn.RNN(N, H, nonlinearity="relu"),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_weights_inputs_and_initial_states_are_those_of_autograd(kind):
    layer = LAYERS[kind]().double()
    x = torch.randn(T, B, N, dtype=torch.float64, requires_grad=True)
    h_0, c_0 = (torch.randn(1, B, H, dtype=torch.float64, requires_grad=True) for _ in range(2))
    is_lstm = kind == "LSTM"
    out, _ = layer(x, (h_0, c_0) if is_lstm else h_0)
    dh = torch.randn_like(out)
    (out * dh).sum().backward()

    weights = [p.detach() for p in layer.parameters()]
    zeros = torch.zeros(B, H, dtype=torch.float64)
    initial = States(h_0[0].detach(), c_0[0].detach() if is_lstm else None)
    final = States(zeros, zeros if is_lstm else None)
    found = CELLS[kind](*weights).back(x.detach(), out.detach(), dh, initial, final, None)

    by_name = {}
    for names, biases, inputs, dA in found.maps:
        gradient = torch.einsum("tbg,tbn->gn", dA, inputs)
        by_name |= dict(zip((name for name, _ in names), gradient.split([n for _, n in names], dim=1), strict=True))
        by_name |= {name: dA.sum((0, 1)) for name in biases}
    for name, gradient in by_name.items():
        torch.testing.assert_close(gradient, getattr(layer, f"{name}_l0").grad)
    torch.testing.assert_close(found.input_gates @ weights[0], x.grad)
    torch.testing.assert_close(found.dinitial.h, h_0.grad[0])
    if is_lstm:
        torch.testing.assert_close(found.dinitial.c, c_0.grad[0])


@pytest.mark.parametrize("kind", LAYERS)
def test_steps_that_are_not_there_pass_the_state_on(kind):
    """Catches padding that takes part: where no step is there, all of the gradient goes to the initial state."""
    cell = CELLS[kind](*(p.detach() for p in LAYERS[kind]().parameters()))
    initial, is_lstm = torch.randn(B, H), kind == "LSTM"
    h = initial.expand(T, B, H).clone()
    dfinal = torch.randn(B, H)
    found = cell.back(
        torch.randn(T, B, N),
        h,
        torch.zeros(T, B, H),
        States(initial, torch.randn(B, H) if is_lstm else None),
        States(dfinal, torch.zeros(B, H) if is_lstm else None),
        torch.zeros(T, B, 1),
    )
    torch.testing.assert_close(found.dinitial.h, dfinal)
    assert all(not dA.any() for _, _, _, dA in found.maps)


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_of_steps_change_nothing(packed, monkeypatch):
    """Catches a block that starts from another state than the last one left, with steps that are not there too."""
    layer = nn.LSTM(N, H).double()
    cell = CELLS["LSTM"](*(p.detach() for p in layer.parameters()))
    x, dh = (torch.randn(T, B, n, dtype=torch.float64) for n in (N, H))
    states = States(*torch.randn(2, B, H, dtype=torch.float64))
    is_there = torch.ones(T, B, 1, dtype=torch.float64)
    is_there[T // 2 :, 0] = 0
    h = layer(x, (states.h[None], states.c[None]))[0].detach()
    found = []
    for block in (1, 3, T):
        monkeypatch.setattr("spectral_dp.gradients.rules.recurrent_cells.BLOCK", block)
        found.append(cell.back(x, h, dh, states, states, is_there if packed else None))
    for other in found[1:]:
        torch.testing.assert_close(other.input_gates, found[0].input_gates)
        torch.testing.assert_close(other.dinitial, found[0].dinitial)
