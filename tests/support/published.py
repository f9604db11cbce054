"""Small data sets in the published formats, with descriptions that know their checksums."""

import gzip
import hashlib
import io
import struct
import tarfile
from functools import partial

import numpy as np

from spectral_dp.data.catalog import DatasetInfo, Edition, Original
from spectral_dp.data.formats import parse_cifar, parse_idx_pair
from spectral_dp.data.packages import Package
from spectral_dp.data.pickles import parse_cifar_pickles

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
TRAIN, TEST = 20, 10


def random_bytes(*shape, below=256):
    return np.random.default_rng(shape).integers(0, below, shape, dtype=np.uint8)


def original(name, content, **changes):
    return Original(**{"name": name, "md5": hashlib.md5(content).hexdigest(), "size": len(content)} | changes)


def recipe_of(name, shape, editions, **changes):
    channels = shape[0]
    return DatasetInfo(name, shape, 10, TRAIN, TEST, (0.5,) * channels, (0.25,) * channels, editions, **changes)


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


def tiny_mnist(**changes):
    """A info and the contents of its four files."""
    arrays = (random_bytes(TRAIN, 4, 4), random_bytes(TRAIN, below=10), random_bytes(TEST, 4, 4), random_bytes(TEST))
    contents = dict(zip(IDX_NAMES, map(idx, arrays), strict=True))
    files = [original(name, content) for name, content in contents.items()]
    edition = Edition(tuple(files[:2]), tuple(files[2:]), "MNIST/raw", parse_idx_pair)
    return recipe_of("tiny", (1, 4, 4), (edition,), **changes), contents


def tiny_mnist_package(**changes):
    return Package(**{"client": "npm", "name": "tiny@1.0.0", "folder": "package/data/", "files": IDX_NAMES} | changes)


CIFAR_BATCHES = ("data_batch_1", "data_batch_2", "test_batch")


def cifar_arrays():
    """Images and labels of each batch."""
    return {
        batch: (random_bytes(10, 3, 32, 32 + number)[..., :32], random_bytes(10 + number, below=10)[:10])
        for number, batch in enumerate(CIFAR_BATCHES)
    }


def cifar_record_bytes(images, labels):
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))


def tiny_cifar(**changes):
    """A info with a binary and a Python edition, and the contents of the files of each."""
    binary = {f"{batch}.bin": cifar_record_bytes(*arrays) for batch, arrays in cifar_arrays().items()}
    pickled = {batch: python2_batch(*arrays) for batch, arrays in cifar_arrays().items()}
    editions = []
    for contents, folder, archive, parse, size in (
        (binary, "cifar-bin", "cifar-binary.tar.gz", partial(parse_cifar, label_bytes=1), {}),
        (pickled, "cifar-py", "cifar-python.tar.gz", partial(parse_cifar_pickles, label_key=b"labels"), {"size": None}),
    ):
        files = tuple(original(name, content, **size) for name, content in contents.items())
        editions.append(Edition(files[:2], files[2:], folder, parse, archive))
    return recipe_of("tiny-cifar", (3, 32, 32), tuple(editions), **changes), binary, pickled


def python2_batch(images, labels, *, label_key=b"labels", constructor=b"cnumpy.core.multiarray\n_reconstruct\n"):
    """A CIFAR batch as Python 2 pickled it (protocol 2, byte strings), opcode for opcode."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def long_text(value):
        return b"T" + struct.pack("<i", len(value)) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    flat = images.reshape(len(images), -1)
    array = constructor + b"cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    element = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    element += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(flat.shape[0]) + number(flat.shape[1]) + b"\x86"
    array += b"(" + number(1) + shape + element + b"\x89" + long_text(flat.tobytes()) + b"tb"
    listed = b"](" + b"".join(number(int(label)) for label in labels) + b"e"
    return b"\x80\x02}(" + text(label_key) + listed + text(b"data") + array + b"u."


def tar(members, *, compressed=True):
    """A tar archive; a member is bytes, or a TarInfo for something odd."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz" if compressed else "w") as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def write(directory, contents, *, compressed=False):
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        path = directory / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content) if compressed else content)
    return directory
