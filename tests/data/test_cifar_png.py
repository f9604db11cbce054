"""CIFAR-10 from pictures: the published bytes, or a reason."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from tests.support.published import cifar_record_bytes, random_bytes

from spectral_dp.data import DataError, cifar_png
from spectral_dp.data.cifar_png import PNG_FILES, batches_from_pictures
from spectral_dp.data.formats import parse_cifar


def picture(pixels, mode="RGB"):
    """Images (N, 3, 32, 32) as a PNG with one image a row."""
    rows = pixels.transpose(0, 2, 3, 1).reshape(len(pixels), 1024, 3)
    stream = io.BytesIO()
    Image.fromarray(rows).convert(mode).save(stream, "PNG")
    return stream.getvalue()


def cifar_package(batch=4):
    images, labels = random_bytes(6 * batch, 3, 32, 32), random_bytes(6 * batch, below=10)
    found = {name: picture(images[number * batch : (number + 1) * batch]) for number, name in enumerate(PNG_FILES[:6])}
    found["train_lables.json"] = json.dumps(labels[: 5 * batch].tolist()).encode()
    found["test_lables.json"] = json.dumps(labels[5 * batch :].tolist()).encode()
    return found, images, labels


def test_cifar_batches_are_rebuilt_byte_for_byte():
    found, images, labels = cifar_package()
    batches = batches_from_pictures(found)
    assert list(batches) == [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    assert b"".join(batches.values()) == cifar_record_bytes(images, labels)
    parsed, classes = parse_cifar(list(batches.values()), label_bytes=1)
    assert np.array_equal(parsed, images)
    assert np.array_equal(classes, labels)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("data_batch_2.png", picture(random_bytes(5, 3, 32, 32)), "1024 x 5 RGB, not 1024 x 4 RGB"),
        ("data_batch_2.png", picture(random_bytes(4, 3, 32, 32), "L"), "1024 x 4 L, not"),
        ("data_batch_2.png", picture(random_bytes(4, 3, 32, 32))[:-500], "truncated or corrupt"),
        ("data_batch_2.png", b"GIF89a", "truncated or corrupt"),
        ("train_lables.json", b"[1, 2, 3]", "3 training labels are not 5 batches"),
        ("train_lables.json", b"{}", "not a list of small numbers"),
        ("train_lables.json", b"[1, 256]", "not a list of small numbers"),
        ("train_lables.json", b"[" * 100_000, "not a list of small numbers"),
    ],
)
def test_damaged_package(name, content, reason):
    found, *_ = cifar_package()
    with pytest.raises(DataError, match=reason):
        batches_from_pictures(found | {name: content})


def test_picture_bomb_is_refused_from_its_header(monkeypatch):
    """A batch of more rows than CIFAR-10 has is not decoded, even if the labels agree with it."""
    monkeypatch.setattr(cifar_png, "_ROWS_LIMIT", 3)
    found, *_ = cifar_package()
    with pytest.raises(DataError, match="at most 3 rows"):
        batches_from_pictures(found)
