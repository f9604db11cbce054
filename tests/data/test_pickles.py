"""The Python edition of CIFAR: as Python 2 wrote it, and nothing that runs."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from tests.support.published import cifar_arrays, python2_batch

from spectral_dp.data import DataError
from spectral_dp.data.pickles import parse_cifar_pickles

IMAGES, LABELS = cifar_arrays()["data_batch_1"]


def parse(*files, key=b"labels"):
    return parse_cifar_pickles(files, key)


def test_the_builder_writes_what_numpy_reads():
    """The oracle of this file: the ordinary unpickler makes the same arrays of these opcodes."""
    constructor = f"c{np.ones(1).__reduce__()[0].__module__}\n_reconstruct\n".encode()  # where this numpy has it
    batch = pickle.loads(python2_batch(IMAGES, LABELS, constructor=constructor), encoding="bytes")
    assert np.array_equal(batch[b"data"].reshape(IMAGES.shape), IMAGES)
    assert batch[b"labels"] == LABELS.tolist()


def test_batches_are_read_in_order():
    images, labels = parse(python2_batch(IMAGES, LABELS), python2_batch(IMAGES[::-1], LABELS[::-1]))
    assert np.array_equal(images, np.concatenate([IMAGES, IMAGES[::-1]]))
    assert np.array_equal(labels, np.concatenate([LABELS, LABELS[::-1]]))


def test_other_label_key():
    _, labels = parse(python2_batch(IMAGES, LABELS, label_key=b"fine_labels"), key=b"fine_labels")
    assert np.array_equal(labels, LABELS)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path):
    attack = pickle.dumps({b"data": Malicious(tmp_path / "ran")}, protocol=3)
    pickle.loads(attack)
    assert (tmp_path / "ran").exists(), "the control: an ordinary unpickler runs it"
    (tmp_path / "ran").unlink()
    with pytest.raises(DataError, match=r"refused: the pickle asks for builtins\.getattr"):
        parse(attack)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [b"os\nsystem", b"builtins\neval", b"numpy\nload", b"numpy.core.multiarray\nscalar"])
def test_names_beyond_the_three_are_refused(name):
    with pytest.raises(DataError, match=f"asks for {name.decode().replace(chr(10), '.')}"):
        parse(python2_batch(IMAGES, LABELS, constructor=b"c" + name + b"\n"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a CIFAR batch"),
        (python2_batch(IMAGES, LABELS)[:-100], "not a CIFAR batch"),
        (pickle.dumps([1, 2]), "not a CIFAR batch"),
        (pickle.dumps({b"data": b"bytes", b"labels": []}), "not a CIFAR batch"),
        (python2_batch(IMAGES, LABELS, label_key=b"other"), "KeyError"),
        (python2_batch(IMAGES, LABELS[:-1]), r"10 images but labels of shape \(9,\)"),
        (python2_batch(IMAGES, [300] * 10), "not a CIFAR batch"),
        (python2_batch(IMAGES, LABELS).replace(b"U\x02u1", b"U\x02O8"), "not an array of bytes"),
    ],
)
def test_damage(content, reason):
    with pytest.raises(DataError, match=reason):
        parse(content)


def test_shape_and_content_must_agree():
    content = python2_batch(IMAGES, LABELS)
    shape = b"J\x0a\x00\x00\x00J\x00\x0c\x00\x00\x86"
    assert content.count(shape) == 1
    with pytest.raises(DataError, match="30720 bytes for images of shape"):
        parse(content.replace(shape, b"J\x0b\x00\x00\x00J\x00\x0c\x00\x00\x86"))
