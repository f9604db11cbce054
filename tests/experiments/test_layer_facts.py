"""What is released of each layer is what its release plan says, in units of the gradient."""

import math

import pytest
import torch
from tests.support.small_targets import public_basis

from spectral_dp import EigenvalueFilter, LayerConfig
from spectral_dp.experiments import methods
from spectral_dp.experiments.layer_facts import describe_layers
from spectral_dp.experiments.network import build_network
from spectral_dp.experiments.trainer import load_data
from spectral_dp.gradients.rules.linear_in_basis import LinearInBasisRule


def method_of(settings):
    data = load_data(settings)
    return methods.start(settings, build_network(settings, tuple(data.train_images.shape[1:]), 10), data)


def test_noise_is_that_of_the_mean_and_what_the_filter_leaves_of_it(tiny):
    """Digits are 8 x 8: of the 64 coordinates of each row of fc1, about half are kept."""
    entries = {entry["name"]: entry for entry in describe_layers(method_of(tiny(linear_ratio=0.5)))}
    assert set(entries) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    std = 1.0 * tiny().max_grad_norm / 50  # the multiplier times the bound, over the batch size
    assert all(entry["noise_std"] == pytest.approx(std) for entry in entries.values())
    fc1, fc2 = entries["fc1.weight"], entries["fc2.weight"]
    gains = torch.tensor(fc1["gains"])
    assert gains.shape == (8, 8)
    assert (fc1["kind"], fc1["transform"], fc1["parameters"]) == ("Linear", "dct", 16 * 64)
    kept = int(gains.count_nonzero())
    assert 28 <= kept <= 32
    assert fc1["released"] == 16 * kept
    assert fc1["noise_std_per_parameter"] == pytest.approx(std * math.sqrt(kept / 64))
    assert "gains" not in fc2
    assert (fc2["released"], fc2["noise_std_per_parameter"]) == (160, pytest.approx(std))


def test_noise_in_a_public_basis_reaches_its_axes_only(tiny):
    """Of the 64 directions of fc1's inputs, 5 get noise, times the post-gains."""
    method = method_of(tiny(linear_ratio=0.5))
    filter, basis = EigenvalueFilter(0.5), public_basis(64, 5)
    rule = LinearInBasisRule(method.model.fc1, LayerConfig(filter, input_basis=basis))
    weight = method.model.fc1.weight
    method.optimizer.gradients._owners[weight] = (rule, "weight")
    fc1 = next(entry for entry in describe_layers(method) if entry["name"] == "fc1.weight")
    post = filter.gains(basis, 5).post
    assert (fc1["transform"], fc1["released"]) == ("public_basis", 16 * 5)
    assert fc1["noise_std_per_parameter"] == pytest.approx(fc1["noise_std"] * math.sqrt(post.square().sum() / 64))


def test_methods_of_others_have_none(tiny):
    assert describe_layers(method_of(tiny(method="nonprivate"))) == []
