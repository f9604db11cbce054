"""What networks read is what their frozen features are computed from."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from spectral_dp.data import ImageDataset, TextDataset
from spectral_dp.data.texts import encoded_texts
from spectral_dp.pretrained import PretrainedWeights
from spectral_dp.pretrained.architectures import IMAGENET
from spectral_dp.pretrained.inputs import network_images, network_pixels, network_texts, without_padding

MEAN, STD = IMAGENET


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_are_resized_and_scaled_by_the_constants_of_the_weights(channels):
    images = torch.randint(256, (2, channels, 8, 8), dtype=torch.uint8)
    pixels = network_pixels(images, 12, MEAN, STD)
    assert pixels.shape == (2, 3, 12, 12)
    expected = F.interpolate(images.double() / 255, (12, 12), mode="bilinear", antialias=True).expand(-1, 3, -1, -1)
    for channel in range(3):
        scaled = (expected[:, channel] - MEAN[channel]) / STD[channel]
        assert torch.allclose(pixels[:, channel].double(), scaled, atol=1e-5)
    assert torch.allclose(network_pixels(images.double() / 255, 12, MEAN, STD), pixels, atol=1e-5)


def test_a_sample_does_not_depend_on_its_batch():
    images = torch.randint(256, (5, 3, 8, 8), dtype=torch.uint8)
    assert torch.equal(network_pixels(images, 16, MEAN, STD)[3:4], network_pixels(images[3:4], 16, MEAN, STD))


def test_padding_of_all_rows_is_cut_off():
    pieces = torch.tensor([[2, 5, 3, 0, 0], [2, 3, 0, 0, 0]])
    assert without_padding(pieces).tolist() == [[2, 5, 3], [2, 3, 0]]
    assert without_padding(pieces[:0]).shape == (0, 1)


def test_images_keep_their_bytes_until_a_batch_is_read():
    images, labels = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8), torch.arange(6) % 2
    records = ImageDataset("some", images[:4], labels[:4], images[4:], labels[4:], 2, (0.1,), (0.2,))
    weights = PretrainedWeights("resnet18", Path("none"), "", MEAN, STD)
    found = network_images(records, weights, 16)
    assert found.train_images is records.train_images
    assert found.input_shape == (3, 16, 16)
    assert torch.equal(found.normalise(images[:2]), network_pixels(images[:2], 16, MEAN, STD))


def test_texts_become_word_pieces(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\ngood\n")
    weights = PretrainedWeights("minilm-l6", tmp_path / "weights", "", MEAN, STD)
    rows, labels = torch.from_numpy(encoded_texts(["good", "good good good", "bad"])), torch.tensor([1, 1, 0])
    found = network_texts(TextDataset("some", rows[:2], labels[:2], rows[2:], labels[2:], 2), weights, 4)
    assert found.train_images.tolist() == [[2, 4, 3, 0], [2, 4, 4, 3]]
    assert found.normalise(found.test_images).tolist() == [[2, 1, 3]]
