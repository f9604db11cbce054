"""A catalog of small data sets, a cache of one's own, and no way out to the network."""

import os
import socket

import pytest

from spectral_dp.data import catalog


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    def refuse(*_):
        raise AssertionError("a test tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def publish(monkeypatch):
    """Puts data sets in the place of the catalog's."""
    return lambda *infos: monkeypatch.setattr(catalog, "DATASETS", infos)


@pytest.fixture
def client(monkeypatch, tmp_path):
    """Puts a shell script first in PATH, under the name of a package client."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")

    def put(name, script):
        path = directory / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return put
