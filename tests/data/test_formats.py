"""IDX and CIFAR binary: read exactly, or refused with the reason."""

import struct

import numpy as np
import pytest
from tests.support.published import cifar_arrays, cifar_record_bytes, idx, random_bytes

from spectral_dp.data import DataError
from spectral_dp.data.formats import parse_cifar, parse_idx, parse_idx_pair


def test_idx_round_trip():
    array = random_bytes(5, 3, 4)
    assert np.array_equal(parse_idx(idx(array), 3), array)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"", "truncated: 0 bytes are less than the IDX header"),
        (lambda content: content[:11], "less than the IDX header of 16"),
        (lambda content: content[:-1], r"truncated: .* announces \[5, 3, 4\] = 60 bytes, 59 follow"),
        (lambda content: content + b"x", "trailing bytes: .* 60 bytes, 61 follow"),
        (lambda content: b"\x00\x00\x0d\x03" + content[4:], "magic 0x00000d03, not 0x00000803"),
        (lambda content: b"\x1f\x8b\x08\x00" + content[4:], "magic 0x1f8b0800"),
        # A header that would ask for 2^96 bytes, and overflow 64-bit arithmetic to something small.
        (lambda content: content[:4] + struct.pack(">3I", *[2**32 - 1] * 3) + content[16:], "truncated"),
        (lambda content: content[:4] + struct.pack(">3I", 2**31, 2**31, 4) + content[16:16], "truncated"),
    ],
)
def test_idx_damage(damage, reason):
    with pytest.raises(DataError, match=reason):
        parse_idx(damage(idx(random_bytes(5, 3, 4))), 3)


def test_idx_images_are_not_labels():
    with pytest.raises(DataError, match="in 1 dimensions"):
        parse_idx(idx(random_bytes(5, 3, 4)), 1)


def test_idx_splits_are_not_mixed():
    with pytest.raises(DataError, match="5 images but 6 labels"):
        parse_idx_pair([idx(random_bytes(5, 3, 4)), idx(random_bytes(6))])


def test_cifar_round_trip_over_batches():
    batches = list(cifar_arrays().values())
    images, labels = parse_cifar([cifar_record_bytes(*batch) for batch in batches], label_bytes=1)
    assert np.array_equal(images, np.concatenate([batch[0] for batch in batches]))
    assert np.array_equal(labels, np.concatenate([batch[1] for batch in batches]))


def test_cifar100_takes_the_fine_label():
    (pixels, _), *_ = cifar_arrays().values()
    coarse, fine = 7, 42
    images, labels = parse_cifar([bytes([coarse, fine]) + pixels[0].tobytes()], label_bytes=2)
    assert labels.tolist() == [fine]
    assert np.array_equal(images[0], pixels[0])


@pytest.mark.parametrize("content", [b"", b"x" * 3072, b"x" * 3074], ids=["empty", "short", "long"])
def test_cifar_damage(content):
    with pytest.raises(DataError, match=f"{len(content)} bytes are not whole records of 3073"):
        parse_cifar([content], label_bytes=1)
