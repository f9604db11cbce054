"""Files of weights: read whole and without running them, or refused with the reason."""

import pickle

import pytest
import torch
from safetensors.torch import save
from tests.support.pretrained import pickled

from spectral_dp.pretrained import WeightsError
from spectral_dp.pretrained.reading import read_file, read_state

STATE = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


class Hostile:
    def __reduce__(self):
        return print, ("this pickle was run",)


@pytest.mark.parametrize("content", [save(STATE), pickled(STATE)], ids=["safetensors", "torch"])
def test_formats(content):
    found = read_state(content, "file")
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[key], STATE[key]) for key in STATE)


def test_the_old_format_of_torch(tmp_path):
    torch.save(STATE, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert read_state(read_file(tmp_path / "old.pth"), "old.pth").keys() == STATE.keys()


@pytest.mark.parametrize("wrapper", ["state_dict", "model", "net"])
@pytest.mark.parametrize("prefix", ["", "module.", "module.model.", "_orig_mod."])
def test_wrappers_are_taken_off(wrapper, prefix):
    wrapped = {wrapper: {prefix + key: value for key, value in STATE.items()}, "epoch": 3}
    assert read_state(pickled(wrapped), "file").keys() == STATE.keys()


@pytest.mark.parametrize("cut", [10, 100, -20])
@pytest.mark.parametrize("content", [save(STATE), pickled(STATE)], ids=["safetensors", "torch"])
def test_truncated(content, cut):
    with pytest.raises(WeightsError, match=r"file is (truncated or damaged|no file of weights)"):
        read_state(content[:cut], "file")


def test_pickles_are_not_run(capsys):
    for content in (pickled({"a": Hostile()}), pickle.dumps(Hostile(), protocol=2)):
        with pytest.raises(WeightsError, match=r"file is refused: it holds more than tensors.*state_dict"):
            read_state(content, "file")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no file of weights: give a .safetensors"),
        (b"<html>not found</html>", "no file of weights"),
        (pickled([1, 2]), "holds a list, not tensors by name"),
        (pickled({"epoch": 3}), "holds no tensors"),
        (save({}), "holds no tensors"),
    ],
)
def test_what_holds_no_weights(content, message):
    with pytest.raises(WeightsError, match=message):
        read_state(content, "file")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(WeightsError, match=r"cannot read the weights .*absent\.pth: No such file"):
        read_file(tmp_path / "absent.pth")
