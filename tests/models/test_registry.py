"""Models by name, or from a module of one's own."""

import pytest
import torch
from torch import nn

from spectral_dp import models
from spectral_dp.layers import BlockCirculantLinear

MNIST = (1, 28, 28)


def test_layers_may_stay_dense():
    model = models.build("model1", input_shape=MNIST, classes=10, block_size=8, dense_layers=["fc1"])
    assert isinstance(model.fc1, nn.Linear)
    assert isinstance(model.fc2, BlockCirculantLinear)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown model 'resnet'.*model1, lenet5.*package.module:factory"):
        models.build("resnet", input_shape=MNIST, classes=10)


def test_a_model_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_model_for_test.py").write_text(
        "from torch import nn\n"
        "def net(input_shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] ** 2, 16), nn.Linear(16, classes))\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    options = {"input_shape": (1, 4, 4), "classes": 2}
    assert models.build("my_model_for_test:net", **options)(torch.zeros(1, 1, 4, 4)).shape == (1, 2)
    circulant = models.build("my_model_for_test:net", block_size=4, last_block_size=2, **options)
    assert [m.block_size for m in circulant.modules() if isinstance(m, BlockCirculantLinear)] == [4, 2]
    with pytest.raises(ValueError, match="takes no activation"):
        models.build("my_model_for_test:net", activation="relu", **options)
    with pytest.raises(ValueError, match="cannot import model 'my_model_for_test:missing'"):
        models.build("my_model_for_test:missing", **options)
    with pytest.raises(TypeError, match="not a function or class"):
        models.build("my_model_for_test:number", **options)


def test_registering_makes_a_model_known_by_name(monkeypatch):
    monkeypatch.setattr("spectral_dp.models.registry._REGISTRY", {})
    models.register_model("tiny", lambda input_shape, classes: nn.Linear(2, classes), spectral={"linear_ratio": 0.5})
    assert isinstance(models.build("tiny", input_shape=(1, 1, 2), classes=3), nn.Linear)
    assert models.entry("tiny").spectral == {"linear_ratio": 0.5}
