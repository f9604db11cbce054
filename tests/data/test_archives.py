"""gzip, tar and zip: bounded, by exact name, in memory only."""

import gzip
import io
import os
import tarfile
import zipfile

import pytest
from tests.support.published import tar

from spectral_dp.data import DataError
from spectral_dp.data.archives import gunzip, read_members, read_zip_members


def test_gunzip():
    assert gunzip(gzip.compress(b"content"), limit=7) == b"content"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (gzip.compress(b"content!"), "more than the 7 bytes"),
        (gzip.compress(bytes(10**7)), "more than the 7 bytes"),
        (gzip.compress(b"content")[:-1], "truncated"),
        (gzip.compress(b"content") + b"more", "4 trailing bytes"),
        (b"content", "corrupt gzip file"),
        (b"", "truncated"),
        (gzip.compress(b"content")[:-8] + bytes(8), "corrupt gzip file"),
    ],
    ids=["too long", "bomb", "cut", "trailing", "not gzip", "empty", "wrong checksum"],
)
def test_gunzip_refuses(content, reason):
    with pytest.raises(DataError, match=reason):
        gunzip(content, limit=7)


@pytest.mark.parametrize("compressed", [True, False])
def test_members_by_name(tmp_path, compressed):
    content = tar({"a/x": b"1", "a/y": b"22", "other": b"3"}, compressed=compressed)
    (tmp_path / "archive").write_bytes(content)
    assert read_members(content, ["a/y", "a/x", "absent"]) == {"a/x": b"1", "a/y": b"22"}
    assert read_members(tmp_path / "archive", ["a/y"]) == {"a/y": b"22"}


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "./x"])
def test_hostile_names_are_other_names(tmp_path, monkeypatch, name):
    """Never followed, never normalised to the one asked for, nothing written."""
    monkeypatch.chdir(tmp_path)
    assert read_members(tar({name: b"evil"}), ["x"]) == {}
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_only_regular_files_are_read(kind):
    member = tarfile.TarInfo("x")
    member.type, member.linkname = kind, "/etc/passwd"
    with pytest.raises(DataError, match="x in the archive is not a regular file"):
        read_members(tar({"x": member}), ["x"])


def test_a_name_twice_is_refused():
    twice = tarfile.TarInfo("x")
    with pytest.raises(DataError, match="twice"):
        read_members(tar({"x": b"first", "again": twice}), ["x"])


@pytest.mark.parametrize("wanted", ["bomb", "x"], ids=["asked for", "in the way"])
def test_a_bomb_ends_at_the_limit(wanted):
    with pytest.raises(DataError, match="more than 100000 bytes"):
        read_members(tar({"bomb": bytes(10**7), "x": b"1"}), [wanted], limit=100_000)


def test_a_header_that_announces_too_much():
    member = tarfile.TarInfo("x")
    member.size = 2**40
    with pytest.raises(DataError, match="truncated or corrupt"):
        read_members(member.tobuf() + b"little", ["x"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive at all" * 100,
        tar({"x": os.urandom(5000)})[:3000],
        tar({"x": bytes(5000)}, compressed=False)[:3000],
    ],
    ids=["empty", "text", "cut gzip", "cut tar"],
)
def test_damage(content):
    with pytest.raises(DataError, match="truncated or corrupt"):
        read_members(content, ["x"])


def zipped(*members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return file.getvalue()


def test_members_of_a_zip_archive_by_name(tmp_path):
    content = zipped(("a/x", b"1"), ("a/y", b"22"), ("../evil", b"3"))
    (tmp_path / "archive").write_bytes(content)
    for archive in (content, tmp_path / "archive"):
        assert read_zip_members(archive, ["a/y", "absent", "a/x", "a/x"]) == {"a/x": b"1", "a/y": b"22"}
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a zip archive"),
        (zipped(("x", b"content" * 99))[:-30], "not a zip archive"),
        (zipped(("x", bytes(10**6))), "more than 1000 bytes"),
        (zipped(("x", bytes(600)), ("y", bytes(600))), "more than 1000 bytes"),
        (zipped(("x", b"content")).replace(zipped(("x", b"content"))[31:36], b"!!!!!"), "truncated or corrupt"),
    ],
    ids=["empty", "cut", "bomb", "bomb of two", "damaged"],
)
def test_zip_archives_that_are_refused(content, reason):
    with pytest.raises(DataError, match=reason):
        read_zip_members(content, ["x", "y"], limit=1000)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_twice_in_a_zip_archive():
    with pytest.raises(DataError, match="x is in the archive twice"):
        read_zip_members(zipped(("x", b"1"), ("x", b"2")), ["x"])
