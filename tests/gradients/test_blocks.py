"""Which layers of a model are trained by which rule, and which of them are clipped together."""

import pytest
import torch
from tests.support.recorded_models import small_cnn
from torch import nn

from spectral_dp.gradients import LayerConfig, ModelGradients
from spectral_dp.gradients.blocks import by_shared_parameters, layers_of
from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.mechanism.filters import LowPassFilter


def test_unknown_layer_names_are_refused():
    with pytest.raises(ValueError, match=r"no trained layer named 'conv9'.*'0'"):
        ModelGradients(small_cnn(), {"conv9": LayerConfig(LowPassFilter(0.5))})
    with pytest.raises(ValueError, match=r"layer '6'.*input_layout"):
        ModelGradients(small_cnn(), {"6": LayerConfig(LowPassFilter(0.5))})


def names_of(model, configs=None):
    return [layer.name for layer in layers_of(model, configs or {})]


def test_only_modules_with_parameters_of_their_own_are_layers():
    assert names_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))) == ["0", "2.0"]


@pytest.mark.filterwarnings("ignore:no rule for")
class TestWithoutARule:
    @pytest.fixture(autouse=True)
    def _nothing_is_held(self, monkeypatch):
        """As in a model that is compiled."""
        monkeypatch.setattr("spectral_dp.gradients.blocks.can_be_held", lambda module: False)

    class Scaled(nn.Module):
        """Has a parameter of its own and no rule, so it is handled with all that it holds."""

        def __init__(self):
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(())), nn.Conv2d(1, 1, 3)

    def test_what_a_fallback_covers_is_not_listed_again(self):
        """Listed twice, the inner layer's gradient would be released twice."""
        (layer,) = layers_of(nn.Sequential(self.Scaled()), {})
        assert (layer.name, type(layer.rule)) == ("0", FallbackRule)
        assert set(layer.rule.parameters()) == {"scale", "inner.weight", "inner.bias"}

    def test_nor_can_it_be_filtered(self):
        with pytest.raises(ValueError, match=r"\['0.inner'\] cannot be filtered: they lie inside '0'"):
            layers_of(nn.Sequential(self.Scaled()), {"0.inner": LayerConfig(LowPassFilter(0.5))})


class TestSharedParameters:
    def test_put_layers_into_one_block(self):
        """Also where two layers have nothing in common but a third one."""
        a, b, c, d = (nn.Linear(2, 2) for _ in range(4))
        a.weight, c.bias = b.weight, b.bias
        blocks = by_shared_parameters(layers_of(nn.ModuleList([a, c, d, b]), {}))
        assert [sorted(layer.name for layer in block) for block in blocks] == [["2"], ["0", "1", "3"]]

    def test_with_different_filters_are_refused(self):
        a, b = nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3)
        b.weight = a.weight
        with pytest.raises(ValueError, match=r"'0' and '1' share 'weight'"):
            ModelGradients(nn.Sequential(a, b), {"0": LayerConfig(LowPassFilter(0.5))})
