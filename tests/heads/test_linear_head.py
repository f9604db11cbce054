"""The weights of a one-shot head as a dense layer."""

import torch

from spectral_dp.heads import LinearHead


def test_scores_are_those_of_centred_features():
    weight, centre, x = torch.randn(3, 5).double(), torch.randn(5), torch.randn(7, 5)
    layer = LinearHead.on_centred(weight, centre).module()
    assert torch.allclose(layer(x).double(), (x.double() - centre) @ weight.T, atol=1e-5)


def test_a_centre_may_have_the_shape_of_a_record():
    weight, centre = torch.randn(3, 6).double(), torch.randn(6)
    flat, shaped = (LinearHead.on_centred(weight, c) for c in (centre, centre.view(2, 3)))
    assert torch.equal(flat.bias, shaped.bias)


def test_without_a_centre_there_is_no_bias():
    head = LinearHead.on_centred(torch.randn(3, 5).double(), None)
    assert not head.bias.any()
    assert head.weight.dtype == head.bias.dtype == torch.float32


def test_the_length_of_a_record_does_not_change_its_class():
    """So a head that was computed on records of unit length is right for records as they are cached."""
    centre, x = torch.randn(5), torch.randn(50, 5)
    layer = LinearHead.on_centred(torch.randn(3, 5).double(), centre).module()
    assert torch.equal(layer(x).argmax(1), layer(centre + 7 * (x - centre)).argmax(1))
