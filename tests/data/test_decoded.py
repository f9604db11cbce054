"""Images are decoded once, for as long as no file changes; what cannot be kept is decoded again."""

import os
import stat

import pytest
import torch
from PIL import Image

from spectral_dp.data import decoded, image_folder
from spectral_dp.data.image_folder import read_image_folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECTRAL_DP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(decoded, "LEAST_FILES", 4)
    return tmp_path / "cache" / "images"


@pytest.fixture
def reads(monkeypatch):
    """The files that are decoded."""
    found, read = [], image_folder._read
    monkeypatch.setattr(image_folder, "_read", lambda file, size: found.append(file) or read(file, size))
    return found


@pytest.fixture
def folder(tmp_path):
    for number in range(6):
        path = tmp_path / "mine" / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    return tmp_path / "mine"


def pixels(folder, size=None):
    found = read_image_folder(folder, size)
    return torch.cat([found.train_images, found.test_images])


def test_the_second_time_nothing_is_decoded(folder, cache, reads):
    first = pixels(folder)
    assert len(reads) == 6
    assert torch.equal(pixels(folder), first)
    assert len(reads) == 6
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_a_changed_image_is_read_again(folder, cache, reads):
    """Catches a key of names alone: training would go on with the pixels of before."""
    before = pixels(folder)
    changed = folder / "cat" / "1.png"
    Image.new("RGB", (4, 4), (200, 0, 0)).save(changed)
    os.utime(changed, ns=(0, 0))
    assert not torch.equal(pixels(folder), before)
    assert len(list(cache.glob("*.npy"))) == 1  # the pixels of before are gone


def test_sizes_and_folders_are_kept_apart(folder, cache, tmp_path, reads):
    assert pixels(folder).shape[2:] == (4, 4)
    assert pixels(folder, 2).shape[2:] == (2, 2)
    folder.rename(tmp_path / "moved")
    assert pixels(tmp_path / "moved").shape[2:] == (4, 4)
    assert len(reads) == 18


def test_few_images_leave_nothing_behind(folder, cache, monkeypatch):
    monkeypatch.setattr(decoded, "LEAST_FILES", 7)
    pixels(folder)
    assert not cache.exists()


def test_a_damaged_or_forbidden_cache_is_done_without(folder, cache):
    first = pixels(folder)
    (path,) = cache.glob("*.npy")
    path.write_bytes(b"no array")
    assert torch.equal(pixels(folder), first)
    path.unlink()
    cache.rmdir()
    cache.write_bytes(b"in the way")
    assert torch.equal(pixels(folder), first)
