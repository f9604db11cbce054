import pytest

from spectral_dp.files import whole_file, write_json, write_text


def test_a_file_appears_whole_and_nothing_beside_it(tmp_path):
    write_text(tmp_path / "note", "old")
    with whole_file(tmp_path / "note") as file:
        file.write(b"new")
        assert (tmp_path / "note").read_text() == "old"  # until the block ends
    assert (tmp_path / "note").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize("failure", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(tmp_path, failure):
    write_text(tmp_path / "note", "old")

    def write_half():
        with whole_file(tmp_path / "note") as file:
            file.write(b"ne")
            raise failure

    with pytest.raises(type(failure)):
        write_half()
    assert (tmp_path / "note").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_others_may_read_it_as_the_umask_says(tmp_path):
    """Catches the mode 0600 of temporary files, which a web server or a colleague could not read."""
    write_text(tmp_path / "note", "text")
    (tmp_path / "plain").write_text("text")
    assert (tmp_path / "note").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere"):
        write_text(tmp_path / "nowhere" / "note", "text")


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "numbers.json", {"epsilon": float("nan")})
    assert not list(tmp_path.iterdir())
