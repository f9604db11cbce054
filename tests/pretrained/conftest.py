"""A cache of one's own, and no way out to the network."""

import socket

import pytest


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    def refuse(*_):
        raise AssertionError("a test tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
