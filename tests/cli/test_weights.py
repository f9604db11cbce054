"""``spectral-dp weights``: getting, listing, and plain errors."""

import json

import pytest
from tests.support.pretrained import published, weights_content
from typer.testing import CliRunner

from spectral_dp.cli import app
from spectral_dp.pretrained import catalog


@pytest.fixture(scope="module")
def content():
    return weights_content("mobilenet-v2")


@pytest.fixture(autouse=True)
def mirror(monkeypatch, tmp_path, content):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))
    directory = tmp_path / "mirror"
    directory.mkdir()
    (directory / "weights.safetensors").write_bytes(content)
    users = published(b"", "", name="wrn-28-10", editions=())
    monkeypatch.setattr(catalog, "WEIGHTS", (published(content, directory.as_uri() + "/"), users))
    return directory


def run(*arguments):
    return CliRunner().invoke(app, ["weights", *map(str, arguments)], env={"COLUMNS": "200"})


def test_get_and_list(tmp_path):
    listed = json.loads(run("list", "--json").stdout)
    assert [(each["name"], each["state"], each["where"]) for each in listed] == [
        ("mobilenet-v2", "absent", None),
        ("wrn-28-10", "own file", None),
    ]
    assert listed[0]["publisher"] == "the tests"
    assert len(listed[0]["editions"][0]["files"]["weights.safetensors"]) == 64
    result = run("get", "mobilenet-v2")
    assert result.exit_code == 0, result.stderr
    assert f"mobilenet-v2: {tmp_path / 'cache' / 'weights' / 'mobilenet-v2'}" in result.stdout
    table = run("list").stdout
    assert "cached" in table
    assert "random numbers" in table
    assert "--weights PATH" in table


def test_elsewhere(tmp_path):
    assert run("get", "mobilenet-v2", "--cache", tmp_path / "other").exit_code == 0
    assert (tmp_path / "other" / "weights" / "mobilenet-v2" / "origin.json").exists()


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [("vgg", 2, "choose one of mobilenet-v2, wrn-28-10"), ("wrn-28-10", 1, "--weights PATH")],
)
def test_what_cannot_be_had(name, code, message):
    result = run("get", name)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_what_was_published_damaged_is_no_network(mirror, monkeypatch):
    """The checksum may be right, and the file still be of another network: that is found at once."""
    other = weights_content("efficientnet-lite0")
    (mirror / "weights.safetensors").write_bytes(other)
    monkeypatch.setattr(catalog, "WEIGHTS", (published(other, mirror.as_uri() + "/"),))
    result = run("get", "mobilenet-v2")
    assert result.exit_code == 1
    assert "looks like efficientnet-lite0" in result.stderr


def test_damage_names_the_cure(tmp_path):
    run("get", "mobilenet-v2")
    (tmp_path / "cache" / "weights" / "mobilenet-v2" / "weights.safetensors").write_bytes(b"damaged")
    result = run("get", "mobilenet-v2")
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert run("get", "mobilenet-v2", "--force").exit_code == 0
