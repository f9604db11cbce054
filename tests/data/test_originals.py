"""Official files on the disk: in every layout users have them, verified, refused by name and reason."""

import gzip

import pytest
from tests.support.published import IDX_NAMES, TEST, TRAIN, cifar_arrays, tar, tiny_cifar, tiny_mnist, write

from spectral_dp.data import DataError, load_dataset
from spectral_dp.data.originals import read_path


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("folder", [".", "MNIST/raw"])
def test_idx_directory(tmp_path, folder, compressed):
    info, contents = tiny_mnist()
    write(tmp_path / folder, contents, compressed=compressed)
    assert read_path(info, tmp_path) == (info.editions[0], contents)


@pytest.mark.parametrize("edition", [0, 1], ids=["binary", "python"])
@pytest.mark.parametrize("layout", ["files", "folder", "archive", "archive in a directory"])
def test_cifar_layouts(tmp_path, publish, layout, edition):
    info, *forms = tiny_cifar()
    publish(info)
    chosen = info.editions[edition]
    archive = tmp_path / chosen.archive
    if layout.startswith("archive"):
        extra = {f"{chosen.folder}/readme.html": b"hello", "../evil": b"evil"}
        archive.write_bytes(
            tar({f"{chosen.folder}/{name}": content for name, content in forms[edition].items()} | extra)
        )
    else:
        write(tmp_path / chosen.folder, forms[edition])
    path = {"files": tmp_path / chosen.folder, "archive": archive}.get(layout, tmp_path)
    dataset = load_dataset("tiny-cifar", path=str(path))
    arrays = list(cifar_arrays().values())
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (TRAIN, TEST)
    assert dataset.train_images[:10].numpy().tobytes() == arrays[0][0].tobytes()
    assert dataset.train_labels[10:].tolist() == arrays[1][1].tolist()
    assert dataset.test_images.numpy().tobytes() == arrays[2][0].tobytes()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-1], "truncated: 335 of 336 bytes"),
        (lambda content: content + b"x", "refused: (337 bytes, 1 more than|decompresses to more than the 336 bytes)"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "md5 .* but the published file has"),
    ],
    ids=["truncated", "trailing", "one bit"],
)
@pytest.mark.parametrize("compressed", [True, False])
def test_damaged_files_are_named(tmp_path, damage, reason, compressed):
    info, contents = tiny_mnist()
    contents[IDX_NAMES[0]] = damage(contents[IDX_NAMES[0]])
    write(tmp_path, contents, compressed=compressed)
    with pytest.raises(DataError, match=f"{IDX_NAMES[0]}.*: {reason}"):
        read_path(info, tmp_path)


def test_a_gzip_bomb_is_not_inflated(tmp_path):
    info, contents = tiny_mnist()
    write(tmp_path, contents, compressed=True)
    (tmp_path / f"{IDX_NAMES[0]}.gz").write_bytes(gzip.compress(bytes(10**7)))
    with pytest.raises(DataError, match="more than the 336 bytes"):
        read_path(info, tmp_path)


def test_an_oversize_file_is_not_read(tmp_path):
    info, contents = tiny_mnist()
    write(tmp_path, contents, compressed=True)
    with (tmp_path / f"{IDX_NAMES[0]}.gz").open("wb") as file:
        file.truncate(2**34)  # sparse: takes no room, but would take 16 GiB to read
    with pytest.raises(DataError, match="refused: 17179869184 bytes, compressed"):
        read_path(info, tmp_path)


def test_files_without_a_published_size_are_bounded_too(tmp_path):
    info, _, pickled = tiny_cifar()
    directory = write(tmp_path / "cifar-py", pickled)
    with (directory / "data_batch_1").open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(DataError, match="refused: 17179869184 bytes"):
        read_path(info, tmp_path)


def test_a_pickle_is_verified_before_it_is_parsed(tmp_path):
    info, _, pickled = tiny_cifar()
    write(tmp_path / "cifar-py", pickled | {"test_batch": b"cos\nsystem\n(S'false'\ntR."})
    with pytest.raises(DataError, match="test_batch: md5"):
        read_path(info, tmp_path)


def test_missing_file(tmp_path):
    info, contents = tiny_mnist()
    del contents[IDX_NAMES[3]]
    with pytest.raises(DataError, match=f"{IDX_NAMES[3]} is missing"):
        read_path(info, write(tmp_path, contents))


def test_archive_with_a_missing_or_damaged_member(tmp_path):
    info, binary, _ = tiny_cifar()
    members = {f"cifar-bin/{name}": content for name, content in binary.items()}
    archive = tmp_path / "renamed.tgz"
    archive.write_bytes(tar(members | {"cifar-bin/test_batch.bin": b"short"}))
    with pytest.raises(DataError, match=r"renamed.tgz: test_batch.bin: truncated: 5 of 30730 bytes"):
        read_path(info, archive)
    del members["cifar-bin/test_batch.bin"]
    archive.write_bytes(tar(members))
    with pytest.raises(DataError, match=r"renamed.tgz: test_batch.bin is missing"):
        read_path(info, archive)


def test_what_is_not_there_says_what_is_read(tmp_path):
    info, *_ = tiny_cifar()
    with pytest.raises(DataError, match="no such file or directory"):
        read_path(info, tmp_path / "absent")
    with pytest.raises(DataError, match=r"holds no tiny-cifar: looked there for cifar-binary.tar.gz or cifar-bin/"):
        read_path(info, tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DataError, match=r"text: not a tar archive.*read from cifar-binary.tar.gz or"):
        read_path(info, tmp_path / "text")
    (tmp_path / "other.tar").write_bytes(tar({"something": b"else"}))
    with pytest.raises(DataError, match=r"other.tar holds no tiny-cifar"):
        read_path(info, tmp_path / "other.tar")
