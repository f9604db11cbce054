"""The spectrum under generated images: of an extractor, a module or the input of a layer, which stay as they were."""

import pytest
import torch
from torch import nn

from spectral_dp.priors import DeadLeaves, generate_images, principal_axes, spectrum_of


class _Halves:
    """Gives a module, as an extractor does."""

    def module(self, input_shape):
        assert input_shape == (1, 6, 6)
        return _Bytes()


class _Bytes(nn.Module):
    def forward(self, pixels):
        assert pixels.dtype == torch.uint8
        return pixels[..., ::2].float() / 2


def test_an_extractor_gets_bytes_and_a_module_numbers_from_zero_to_one():
    found = spectrum_of(_Halves(), (1, 6, 6), images=100)
    assert found.basis.shape[0] == 18
    assert 20 < found.mean.mean() < 90
    assert 0.2 < spectrum_of(nn.Flatten(), (1, 6, 6), images=100).mean.mean() < 0.8


@pytest.mark.parametrize("images", [10, 64, 100])
def test_every_image_counts_once(images):
    shape = (1, 6, 6)
    found = spectrum_of(nn.Flatten(), shape, images=images, seed=4, prior="one-over-f")
    x = generate_images("one-over-f", images, shape, seed=4).flatten(1).float() / 255
    expected = principal_axes([x], count=images)
    assert torch.allclose(found.mean, x.mean(0), atol=1e-5)
    assert torch.allclose(found.eigenvalues, expected.eigenvalues, rtol=1e-3, atol=1e-7)


def test_it_can_be_of_the_input_of_a_layer():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 2))
    assert spectrum_of(model, (1, 6, 6), images=50, layer="3").basis.shape == (5, 5)


def test_tokens_count_each():
    model = nn.Sequential(nn.Flatten(2), nn.Linear(36, 4))  # three channels as three tokens
    found = spectrum_of(model, (3, 6, 6), images=70, layer="1")
    assert found.basis.shape == (36, 36)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 5))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    one, two = (spectrum_of(model, (1, 6, 6), images=50, layer="2") for _ in range(2))
    assert torch.equal(one.eigenvalues, two.eigenvalues)  # in evaluation mode, so without dropout
    assert [part.training for part in model] == [True, False, True]
    assert not model[2]._forward_pre_hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_inputs_can_be_prepared():
    found = spectrum_of(
        nn.Flatten(), (1, 6, 6), images=50, prepare=lambda pixels: pixels.float() + 1000, prior=DeadLeaves(leaves=5)
    )
    assert found.mean.min() > 999


def test_a_layer_that_is_not_there_is_named():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
    with pytest.raises(ValueError, match="no layer named 'fc': it has 0, 1"):
        spectrum_of(model, (1, 6, 6), layer="fc")
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: model[1](model[0](x))
    with pytest.raises(ValueError, match="'spare' was not called"):
        spectrum_of(model, (1, 6, 6), layer="spare")
