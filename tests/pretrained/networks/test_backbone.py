"""What all networks for images share: maps, their average, a head, and samples that do not meet."""

import pytest
import torch
from tests.support.pretrained import small_inputs, small_network

from spectral_dp.pretrained import NAMES
from spectral_dp.pretrained.networks.backbone import ImageBackbone

IMAGES = [name for name in NAMES if name != "minilm-l6"]


@pytest.mark.parametrize("name", IMAGES)
def test_maps_are_averaged_and_scored(name):
    network, images = small_network(name, 5), small_inputs(name)
    assert isinstance(network, ImageBackbone)
    with torch.no_grad():
        maps, pooled, scores = network.maps(images), network.pooled(images), network(images)
    assert maps.shape[:2] == (3, network.width)
    assert torch.allclose(pooled, maps.mean((2, 3)))
    assert torch.allclose(scores, network.get_submodule(network.head)(pooled))
    assert scores.shape == (3, 5)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_head_pooled_features_come_out(name):
    network, inputs = small_network(name), small_inputs(name)
    with torch.no_grad():
        assert torch.equal(network(inputs), network.pooled(inputs))


@pytest.mark.parametrize("name", NAMES)
def test_samples_do_not_meet_in_evaluation(name):
    """Catches statistics of the batch, which would make features of a record depend on others."""
    network, inputs = small_network(name), small_inputs(name)
    with torch.no_grad():
        assert torch.allclose(network(inputs)[1:2], network(inputs[1:2]), atol=1e-5)


def test_negative_control_in_training_mode_they_do_meet():
    network, images = small_network("resnet18").train(), small_inputs("resnet18")
    with torch.no_grad():
        assert not torch.allclose(network(images)[1:2], network(images[1:])[:1], atol=1e-3)
