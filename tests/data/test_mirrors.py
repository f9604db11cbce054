"""Downloads from mirrors: given up in time, bounded in size, and told of."""

import gzip
import http.client
import io
import time
import urllib.request

import pytest
from tests.support.published import IDX_NAMES, tar, tiny_cifar, tiny_mnist

from spectral_dp.data import DataError, fetch_dataset, mirrors


def test_an_archive_without_a_file(tmp_path, publish):
    info, binary, _ = tiny_cifar(mirrors=(tmp_path.as_uri() + "/",))
    del binary["test_batch.bin"]
    (tmp_path / "cifar-binary.tar.gz").write_bytes(tar({f"cifar-bin/{name}": c for name, c in binary.items()}))
    publish(info)
    with pytest.raises(DataError, match=r"test_batch.bin is missing"):
        fetch_dataset("tiny-cifar")


def test_a_mirror_that_does_not_answer_is_given_up(publish, monkeypatch):
    """Even one that would hang for longer than the timeout of a socket: a host with many dead addresses."""
    monkeypatch.setattr(mirrors, "_TIMEOUT", 0.1)
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: time.sleep(2))
    publish(tiny_mnist(mirrors=("https://mirror.invalid/",))[0])
    start = time.monotonic()
    with pytest.raises(DataError, match=r"mirror.invalid/: no answer in 0.1 s"):
        fetch_dataset("tiny")
    assert time.monotonic() - start < 1


class Answer(io.BytesIO):
    """What a server sends, and what it says of its length."""

    def __init__(self, content, announced=None):
        super().__init__(content)
        self.headers = {} if announced is None else {"Content-Length": str(announced)}


@pytest.fixture
def served(monkeypatch):
    """Serves files by name, in place of every server."""
    asked = []

    def serve(files):
        def urlopen(request, timeout):
            asked.append((request.full_url, request.get_header("User-agent"), timeout))
            answer = files[request.full_url.rsplit("/", 1)[1]]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        return asked

    return serve


def fetched(progress=lambda *_: None):
    (edition,) = tiny_mnist()[0].editions
    return mirrors.fetch_from_mirror(edition, "https://mirror.invalid/", progress)


def test_files_are_asked_for_compressed_and_come_unpacked(served):
    contents = tiny_mnist()[1]
    asked = served({f"{name}.gz": Answer(gzip.compress(content)) for name, content in contents.items()})
    assert fetched() == contents
    assert [url for url, *_ in asked] == [f"https://mirror.invalid/{name}.gz" for name in IDX_NAMES]
    assert {(agent, timeout) for _, agent, timeout in asked} == {("spectral-dp", mirrors._TIMEOUT)}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(b"half", announced=8), "truncated: 4 of 8 bytes came"),
        (Answer(bytes(2 * 2**20)), r"refused: https://mirror.invalid/.* sends more than"),
        (OSError("no route to host"), "no route to host"),
        (http.client.IncompleteRead(b""), "IncompleteRead"),
    ],
    ids=["truncated", "endless", "unreachable", "broken off"],
)
def test_what_goes_wrong_is_a_data_error(served, answer, message):
    served({f"{IDX_NAMES[0]}.gz": answer})
    with pytest.raises(DataError, match=message):
        fetched()


def test_an_unknown_length_is_told_as_such(served):
    told = []
    contents = tiny_mnist()[1]
    served({f"{name}.gz": Answer(gzip.compress(content)) for name, content in contents.items()})
    fetched(lambda *what: told.append(what))
    assert [total for *_, total in told] == [None] * 4
