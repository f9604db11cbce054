"""Downloads from official mirrors: given up in time, bounded in size."""

from __future__ import annotations

import http.client
import queue
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

from spectral_dp.data.archives import gunzip, read_members
from spectral_dp.data.catalog import Edition
from spectral_dp.data.errors import DataError
from spectral_dp.data.packages import Contents

DownloadProgress = Callable[[str, int, int | None], None]
"""Told what is being fetched, how many bytes of it have come, and of how many (None: not known)."""

_TIMEOUT = 8.0  # seconds without an answer or a byte
_CHUNK = 2**18
_OVERHEAD = 2**20  # what compression and archive headers may add to the published files
_USER_AGENT = "spectral-dp"


def fetch_from_mirror(edition: Edition, address: str, progress: DownloadProgress) -> Contents:
    """Downloads the files of an edition, or its archive, from below an address; they are not verified yet.

    Raises:
        DataError: Not reached, no answer in time, or an answer that is damaged or too large.
    """
    if edition.archive is None:
        return {
            file.name: gunzip(download(f"{address}{file.name}.gz", file.limit, progress), file.limit)
            for file in edition.files
        }
    archive = download(address + edition.archive, edition.limit, progress)
    found = read_members(archive, [f"{edition.folder}/{file.name}" for file in edition.files])
    return {name.removeprefix(f"{edition.folder}/"): content for name, content in found.items()}


def download(url: str, size: int, progress: DownloadProgress) -> bytes:
    """Downloads a file that holds at most ``size`` bytes, compressed; it is not verified yet.

    Raises:
        DataError: Not reached, no answer in time, or an answer that is cut off or too large.
    """
    limit = size + _OVERHEAD
    content = bytearray()
    try:
        with _open(urllib.request.Request(url, headers={"User-Agent": _USER_AGENT})) as answer:
            announced = answer.headers.get("Content-Length") or ""
            total = int(announced) if announced.isdecimal() else None
            while chunk := answer.read(_CHUNK):
                content += chunk
                if len(content) > limit:
                    raise DataError(f"refused: {url} sends more than {limit} bytes")
                progress(url, len(content), total)
    except (OSError, http.client.HTTPException) as error:
        raise DataError(str(error) or type(error).__name__) from error
    if total is not None and len(content) < total:
        raise DataError(f"truncated: {len(content)} of {total} bytes came")
    return bytes(content)


def _open(request: urllib.request.Request) -> Any:
    """Opens an address, or gives it up in time.

    The timeout of a socket alone would not do: it holds for each address of a host in turn, and for no name server.
    """
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            answers.put(urllib.request.urlopen(request, timeout=_TIMEOUT))
        except BaseException as error:
            answers.put(error)

    threading.Thread(target=attempt, daemon=True).start()
    try:
        answer = answers.get(timeout=_TIMEOUT)
    except queue.Empty:
        raise TimeoutError(f"no answer in {_TIMEOUT:g} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer
