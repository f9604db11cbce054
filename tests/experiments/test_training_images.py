"""The control that is not private: training images in the place of generated ones, and marked as such."""

import pytest
import torch

from spectral_dp.data import load_dataset
from spectral_dp.experiments.training_images import TrainingImages, cifar10, digits, fashion_mnist, mnist
from spectral_dp.priors import generate_images, get_prior, prior_assumption


def test_its_images_are_those_of_the_data_set():
    own = {image.numpy().tobytes() for image in load_dataset("digits").train_images}
    drawn = generate_images(digits(), 100, (1, 8, 8))
    assert all(image.numpy().tobytes() in own for image in drawn)
    assert len(torch.unique(drawn, dim=0)) > 50


@pytest.mark.parametrize("control", [digits, mnist, fashion_mnist, cifar10])
def test_it_says_that_it_is_not_public(control):
    assert not control().is_public
    assert "the training records themselves" in prior_assumption(control())
    assert control().settings["dataset"] == control().dataset, "another data set is another cache"


def test_it_is_found_by_its_import_path():
    assert get_prior("spectral_dp.experiments.training_images:digits") == TrainingImages("digits")


def test_images_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"images of digits have the shape \(1, 8, 8\), not \(3, 32, 32\)"):
        generate_images(digits(), 2, (3, 32, 32))
