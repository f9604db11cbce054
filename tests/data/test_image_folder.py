"""One's own images: read as they are meant, and refused with the name of the file."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from spectral_dp.data import DataError, image_folder
from spectral_dp.data.image_folder import class_names, read_image_folder


def put(path, colour=(10, 20, 30), size=(4, 6), **options):
    """Writes an image of one colour; ``size`` is width and height."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    for number in range(10):
        put(tmp_path / "mine" / "cat" / f"{number}.png", (number, 0, 0))
        put(tmp_path / "mine" / "dog" / f"{number}.png", (number, 100, 0))
    return tmp_path / "mine"


class TestReading:
    def test_classes_are_folders_and_a_fifth_is_held_out(self, folder):
        found = read_image_folder(folder)
        assert class_names(folder) == ["cat", "dog"]
        assert found.train_images.shape == (16, 3, 6, 4)
        assert found.test_images.shape == (4, 3, 6, 4)
        assert found.train_images.dtype == torch.uint8
        assert (found.classes, found.mean, found.std) == (2, (0.5,) * 3, (0.25,) * 3)
        images, labels = (
            torch.cat([found.train_images, found.test_images]),
            torch.cat([found.train_labels, found.test_labels]),
        )
        assert torch.equal(images[:, 1, 0, 0] == 100, labels == 1)
        assert sorted(images[:, 0, 0, 0].tolist()) == sorted([*range(10)] * 2)

    def test_the_split_is_always_the_same(self, folder):
        assert torch.equal(read_image_folder(folder).test_images, read_image_folder(folder).test_images)

    def test_train_and_test_are_the_split(self, folder, tmp_path):
        folder.rename(tmp_path / "train")
        put(tmp_path / "test" / "dog" / "a.png", (7, 100, 0))
        found = read_image_folder(tmp_path)
        assert (len(found.train_images), found.test_labels.tolist()) == (20, [1])
        assert class_names(tmp_path) == ["cat", "dog"]

    def test_mixed_sizes_are_resized(self, folder):
        put(folder / "cat" / "large.jpg", (0, 0, 0), (40, 30))
        assert read_image_folder(folder, 8).train_images.shape[1:] == (3, 8, 8)

    def test_grey_and_transparent_images_become_colour(self, folder):
        Image.new("L", (4, 6), 9).save(folder / "cat" / "grey.png")
        Image.new("RGBA", (4, 6), (1, 2, 3, 4)).save(folder / "cat" / "clear.png")
        assert len(read_image_folder(folder).train_images) == 18

    def test_hidden_files_are_left_out(self, folder):
        (folder / "cat" / ".DS_Store").write_bytes(b"?")
        (folder / ".git").mkdir()
        assert len(read_image_folder(folder).train_images) == 16

    def test_pixels_are_those_of_the_file(self, folder):
        pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "dog" / "5.png")
        found = read_image_folder(folder)
        images = torch.cat([found.train_images, found.test_images])
        assert any(torch.equal(image.permute(1, 2, 0), torch.from_numpy(pixels)) for image in images)


class TestRefusals:
    @pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n and then nothing"])
    def test_a_file_that_is_no_image_is_named(self, folder, content):
        (folder / "dog" / "broken.png").write_bytes(content)
        with pytest.raises(DataError, match=r"dog/broken\.png cannot be read as an image .* move it away"):
            read_image_folder(folder)

    def test_a_truncated_image_is_named(self, folder):
        pixels = np.random.default_rng(0).integers(0, 256, (60, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "dog" / "broken.png")
        content = (folder / "dog" / "broken.png").read_bytes()
        (folder / "dog" / "broken.png").write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=r"dog/broken\.png cannot be read"):
            read_image_folder(folder)

    @pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
    def test_a_bomb_is_named_and_not_decoded(self, folder, monkeypatch):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
        with pytest.raises(DataError, match=r"cat/0\.png cannot be read as an image .*bomb"):
            read_image_folder(folder)

    def test_mixed_sizes_without_a_size(self, folder):
        put(folder / "dog" / "x.png", size=(5, 6))
        with pytest.raises(DataError, match=r"dog/x\.png has 5 x 6 pixels, and .*cat/0\.png 4 x 6: give --image-size"):
            read_image_folder(folder)

    def test_more_than_memory_holds(self, folder, monkeypatch):
        monkeypatch.setattr(image_folder, "_MOST_BYTES", 100)
        with pytest.raises(DataError, match=r"20 images of 4 x 6 pixels.*smaller --image-size"):
            read_image_folder(folder)

    def test_one_class(self, tmp_path):
        put(tmp_path / "cat" / "a.png")
        with pytest.raises(DataError, match=r"only the folder cat: .*at least two classes"):
            read_image_folder(tmp_path)

    def test_no_class(self, tmp_path):
        put(tmp_path / "a.png")
        with pytest.raises(DataError, match="has no folder"):
            read_image_folder(tmp_path)

    def test_an_empty_class(self, folder):
        (folder / "bird").mkdir()
        with pytest.raises(DataError, match="bird has no image"):
            read_image_folder(folder)

    def test_a_folder_within_a_class(self, folder):
        put(folder / "dog" / "more" / "a.png")
        with pytest.raises(DataError, match="dog/more is a folder in the folder of a class"):
            read_image_folder(folder)

    def test_a_test_class_that_training_has_not(self, folder, tmp_path):
        folder.rename(tmp_path / "train")
        put(tmp_path / "test" / "bird" / "a.png")
        with pytest.raises(DataError, match=r"test/bird is a class that .*train does not have"):
            read_image_folder(tmp_path)

    def test_half_a_split(self, folder, tmp_path):
        folder.rename(tmp_path / "train")
        with pytest.raises(DataError, match="has train but no test"):
            read_image_folder(tmp_path)

    def test_an_empty_test_split(self, folder, tmp_path):
        folder.rename(tmp_path / "train")
        (tmp_path / "test" / "dog").mkdir(parents=True)
        with pytest.raises(DataError, match="test has no image"):
            read_image_folder(tmp_path)

    def test_no_directory(self, tmp_path):
        with pytest.raises(DataError, match="nowhere is no directory"):
            read_image_folder(tmp_path / "nowhere")

    def test_without_pillow_it_says_how_to_get_it(self, folder, monkeypatch):
        monkeypatch.setitem(sys.modules, "PIL", None)
        with pytest.raises(DataError, match=r"pip install 'spectral-dp\[cli\]'"):
            read_image_folder(folder)
