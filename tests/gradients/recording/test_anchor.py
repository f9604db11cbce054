"""Where the backward pass comes, and ends."""

import torch
from torch import nn

from spectral_dp.gradients.recording.anchor import Anchor, Detour, Widened, anchor_like, hookable


def test_a_tensor_that_needs_no_gradient_is_reached_without_a_copy():
    x = torch.randn(3)
    y, seen = hookable(x), []
    assert y.data_ptr() == x.data_ptr()
    y.register_hook(seen.append)
    (2 * y).sum().backward()
    assert torch.equal(seen[0], torch.full((3,), 2.0))


def test_hooks_on_a_view_survive_a_change_in_place():
    x = torch.randn(2, 3, requires_grad=True)
    y, seen = hookable((x * 1)[0]), []
    y.register_hook(lambda d: seen.append(d))
    y.mul_(3).sum().backward()
    assert torch.equal(seen[0], torch.full((3,), 3.0))
    assert torch.equal(x.grad[0], torch.full((3,), 3.0))


def test_the_only_view_of_a_matrix_product_is_not_copied():
    layer = nn.Linear(3, 3).requires_grad_(False)
    x = torch.randn(2, 4, 3, requires_grad=True)
    view = layer(x)
    assert view._is_view()
    y, seen = hookable(view, is_sole=True), []
    assert y.data_ptr() == view.data_ptr()
    y.register_hook(lambda d: seen.append(d))
    y.mul_(3).sum().backward()
    assert torch.equal(seen[0], torch.full((2, 4, 3), 3.0))
    torch.testing.assert_close(x.grad, 3 * layer.weight.sum(0).expand(2, 4, 3))


def test_the_backward_pass_ends_at_an_anchor():
    x = torch.randn(3, requires_grad=True)
    Anchor.apply(x * 1, anchor_like(x)).sum().backward()
    assert x.grad is None


def test_every_sample_has_an_entry_and_none_is_a_copy():
    x, seen = torch.randn(4), []
    wide = Widened.apply(x, 3, anchor_like(x))
    assert wide.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    wide.register_hook(seen.append)
    (wide * torch.arange(3.0)[:, None]).sum().backward()
    assert torch.equal(seen[0], torch.arange(3.0)[:, None].expand(3, 4))


def test_a_detour_leads_from_the_outputs_to_the_inputs():
    """What the function returns is the inputs' gradient, whatever the outputs were made of."""
    x, seen = torch.randn(3, requires_grad=True), []

    def back(grads):
        seen.extend(grads)
        return [torch.full((3,), 7.0)]

    first, second = Detour.apply(back, 2, x.detach() * 2, x.detach() * 3, x)
    assert second.requires_grad
    first.sum().backward()
    assert torch.equal(seen[0], torch.ones(3))
    assert seen[1] is None, "the loss does not depend on it"
    assert torch.equal(x.grad, torch.full((3,), 7.0))
