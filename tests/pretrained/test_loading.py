"""Weights fill a network wholly, or are refused with what they look like."""

import pytest
import torch
from tests.support.pretrained import state_of

from spectral_dp.pretrained import WeightsError, find_architecture
from spectral_dp.pretrained.loading import load_state, looks_like

MOBILENET = find_architecture("mobilenet-v2")


def load(state, classes=None, architecture=MOBILENET):
    return load_state(architecture.build(classes), architecture, state, "file.pth")


@pytest.mark.parametrize("classes", [None, 5, 7])
def test_a_head_of_another_size_is_dropped(classes):
    state = state_of("mobilenet-v2", classes=5)
    network = load(state, classes)
    loaded = network.state_dict()
    body = [key for key in loaded if not key.startswith("classifier.")]
    assert all(torch.equal(loaded[key], state[key]) for key in body)
    if classes is not None:
        same = torch.equal(loaded["classifier.1.weight"][:5], state["classifier.1.weight"])
        assert same == (classes == 5)


def test_counters_of_batches_may_be_missing():
    state = {key: value for key, value in state_of("mobilenet-v2").items() if "num_batches" not in key}
    load(state)


def test_what_a_published_file_has_besides_is_known():
    minilm = find_architecture("minilm-l6")
    with torch.device("meta"):
        state = minilm.build().state_dict()
    state = {key: torch.zeros(value.shape) for key, value in state.items()}
    state |= {"pooler.dense.weight": torch.zeros(384, 384), "embeddings.position_ids": torch.arange(512)[None]}
    load(state, architecture=minilm)


def test_weights_of_another_network_are_recognised():
    with pytest.raises(WeightsError, match=r"file\.pth does not hold weights of mobilenet-v2.*looks like resnet18"):
        load(state_of("resnet18"))
    with pytest.raises(WeightsError, match="looks like efficientnet-lite0: ask for that network"):
        load(state_of("efficientnet-lite0"), architecture=find_architecture("efficientnet-lite2"))
    with pytest.raises(WeightsError, match="It looks like no network that we know"):
        load({"a": torch.ones(2)})


def test_what_is_missing_unknown_or_of_another_shape_is_named():
    state = state_of("mobilenet-v2")
    with pytest.raises(WeightsError, match=r"1 of its names are missing \(features.0.0.weight"):
        load({key: value for key, value in state.items() if key != "features.0.0.weight"})
    with pytest.raises(WeightsError, match=r"1 of its names are unknown \(more"):
        load(state | {"more": torch.ones(1)})
    with pytest.raises(WeightsError, match=r"features.0.0.weight is \(32, 1, 3, 3\), not \(32, 3, 3, 3\)"):
        load(state | {"features.0.0.weight": torch.ones(32, 1, 3, 3)})


def test_numbers_that_are_none():
    with pytest.raises(WeightsError, match=r"damaged: features.0.0.weight holds NaN"):
        load(state_of("mobilenet-v2") | {"features.0.0.weight": torch.full((32, 3, 3, 3), torch.nan)})


@pytest.mark.parametrize("name", ["resnet18", "efficientnet-lite1", "efficientnet-lite2"])
def test_looks_like(name):
    assert looks_like(state_of(name)) == name
