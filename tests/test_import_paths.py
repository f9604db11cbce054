"""What a user has written, by import path."""

import pytest

from spectral_dp.import_paths import imported_factory


def test_modules_where_one_works_are_found(tmp_path, monkeypatch):
    (tmp_path / "my_factory_for_test.py").write_text("def make():\n    return 3\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    assert imported_factory("my_factory_for_test:make", "thing")() == 3
    with pytest.raises(TypeError, match="is a int, not a function or class that makes a thing"):
        imported_factory("my_factory_for_test:number", "thing")


@pytest.mark.parametrize("path", ["no_such_module_at_all:make", "json:missing", ":make", "json:"])
def test_a_path_with_nothing_at_it_says_how_to_write_it(path):
    with pytest.raises(ValueError, match=r"cannot import thing .*: give it as package.module:factory"):
        imported_factory(path, "thing")
