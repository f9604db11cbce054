"""What a module was called with, with an entry or several rows for each sample."""

import torch

from spectral_dp.gradients.recording.call import Call, OutputGradients, of_samples
from spectral_dp.gradients.recording.shared import Shared


def shared(value, samples=3):
    return Shared.make(value, value.expand(samples, *value.shape), 0, None)


def test_tensors_are_found_at_any_depth_and_those_that_are_shared_are_wide():
    x, mask, token = torch.randn(3, 2), torch.ones(3), torch.randn(4)
    found = Call(([x], "text"), {"masks": {"one": mask}, "token": shared(token)}).tensors()
    assert [tuple(v.shape) for v in found] == [(3, 2), (3,), (3, 4)]
    assert found[0] is x
    assert of_samples(x) is x


def test_a_call_that_samples_share_has_an_entry_for_each():
    table, token = torch.randn(5, 2), torch.randn(4)
    call = Call((table, 2.0), {"token": shared(token)}).wide(3)
    assert (call.is_shared, call.has_rows) == (True, True)
    assert torch.equal(call.args[0], table.expand(3, 5, 2))
    assert call.args[1] == 2.0
    assert torch.equal(call.kwargs["token"], token.expand(3, 4))


def test_rows_of_a_sample_get_a_dimension_and_what_is_of_another_length_does_not():
    x, table = torch.arange(12.0).view(6, 2), torch.randn(5)
    call = Call((x, table), {}).with_rows(6, 3)
    assert (call.is_shared, call.has_rows) == (False, True)
    assert torch.equal(call.args[0], x.view(3, 2, 2))
    assert call.args[1] is table


def test_a_detached_call_keeps_everything_else():
    x = torch.randn(3, requires_grad=True)
    for call in (Call((x * 2,), {}), Call((x * 2, "text"), {"y": [x * 3]}, has_rows=True, parameter="gate")):
        plain = call.detached()
        assert not any(v.requires_grad for v in plain.tensors())
        assert [v.tolist() for v in plain.tensors()] == [v.tolist() for v in call.tensors()]
        assert plain[2:] == call[2:]


def test_keywords_are_changed_as_arguments_are():
    """Of a layer that was called as ``layer(input=x)``, the rows would stay as they came."""
    x = torch.randn(6, 2, requires_grad=True) * 2
    for args in ((), (x,)):
        call = Call(args, {"input": x})
        assert all(v.shape == (3, 2, 2) for v in call.with_rows(6, 3).tensors())
        assert all(v.shape == (3, 6, 2) for v in call.wide(3).tensors())
        assert not any(v.requires_grad for v in call.detached().tensors())
        assert all(v.is_meta for v in call.shapes().tensors())


def test_which_gradients_are_needed_is_told_by_identity():
    x = torch.randn(3)
    needed = OutputGradients((None,), frozenset([id(x)]))
    assert needed.needs(x)
    assert not needed.needs(x.clone())
    assert not needed.needs(None)
