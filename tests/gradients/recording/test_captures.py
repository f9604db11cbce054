"""What a backward pass brings: kept once, and only where the numbers are still those of the forward pass."""

import gc

import pytest
import torch
from torch import nn

from spectral_dp.gradients.recording.call import Call, OutputGradients, TakenOver
from spectral_dp.gradients.recording.captures import Captures


def captured(condense=lambda module, call, dA: (call, dA), with_output=(), taken_over=()):
    return Captures(condense, with_output, taken_over)


def a_use(captures, layer, x, **options):
    output = x * 2
    captures.watch(layer, Call((x,), {}), output, **options)
    return output


def test_a_use_is_kept_when_the_backward_pass_reaches_it():
    captures, layer, x = captured(), nn.Identity(), torch.ones(3, requires_grad=True)
    output = a_use(captures, layer, x)
    assert captures.take() == {}
    (3 * output).sum().backward()
    ((call, dA), _), *others = captures.take()[layer]
    assert not others
    assert torch.equal(call.args[0], x)
    assert not call.args[0].requires_grad
    assert torch.equal(dA, torch.full((3,), 3.0))
    assert captures.take() == {}


def test_uses_of_one_backward_pass_have_one_number():
    captures, layer, x = captured(), nn.Identity(), torch.ones(3, requires_grad=True)
    (a_use(captures, layer, x) + a_use(captures, layer, x)).sum().backward()
    a_use(captures, layer, x).sum().backward()
    first, second, third = (capture.backward_pass for capture in captures.take()[layer])
    assert first == second != third


def test_an_input_changed_in_place_is_an_error_not_a_wrong_gradient():
    captures, x = captured(), torch.ones(3, requires_grad=True).clone()
    output = a_use(captures, nn.Identity(), x)
    x += 1
    with pytest.raises(RuntimeError, match="changed in place after its forward pass"):
        output.sum().backward()


def test_a_second_backward_pass_is_an_error():
    captures, x = captured(), torch.ones(3, requires_grad=True)
    loss = a_use(captures, nn.Identity(), x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass through the same graph"):
        loss.backward()


def test_rows_get_a_dimension_of_their_own():
    captures, layer, x = captured(with_output=()), nn.Identity(), torch.ones(6, 2, requires_grad=True)
    output = x * 2
    captures.watch(layer, Call((x,), {}, has_rows=True), output, samples=3)
    output.sum().backward()
    (((_, dA), _),) = captures.take()[layer]
    assert dA.shape == (3, 2, 2)


def test_without_its_object_a_graph_keeps_nothing():
    captures, x = captured(), torch.ones(3, requires_grad=True)
    output = a_use(captures, nn.Identity(), x)
    del captures
    gc.collect()
    output.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


class TestTakenOver:
    layer = nn.Identity()

    def recorded(self, condense):
        captures, x = captured(condense, taken_over={self.layer}), torch.ones(3, requires_grad=True)
        return captures, captures.recording(self.layer, Call((x,), {}), x * 2)

    def test_gradients_of_inputs_are_handed_back(self, monkeypatch):
        monkeypatch.setattr("spectral_dp.gradients.recording.captures.is_for_inputs_only", lambda: False)

        def condense(module, call, dA):
            assert isinstance(dA, OutputGradients)
            return TakenOver("kept", [(call.args[0], 7 * dA.gradients[0])])

        captures, record = self.recorded(condense)
        (gradient,) = record([torch.ones(3)])
        assert torch.equal(gradient, torch.full((3,), 7.0))
        assert [capture.kept for capture in captures.take()[self.layer]] == ["kept"]

    def test_an_input_without_a_gradient_is_an_error(self, monkeypatch):
        monkeypatch.setattr("spectral_dp.gradients.recording.captures.is_for_inputs_only", lambda: False)
        _captures, record = self.recorded(lambda module, call, dA: TakenOver("kept", []))
        with pytest.raises(RuntimeError, match="needs a gradient, such as a mask of padding"):
            record([torch.ones(3)])

    def test_without_its_object_there_is_no_gradient_to_hand_back(self):
        captures, record = self.recorded(lambda module, call, dA: None)
        del captures
        gc.collect()
        with pytest.raises(ReferenceError, match="keep it until then"):
            record([torch.ones(3)])
