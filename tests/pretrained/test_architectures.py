"""Every network is found by its name, and its head and its last stage are parts of it."""

import pytest
from tests.support.pretrained import small_architecture, small_network

from spectral_dp.pretrained import ARCHITECTURES, NAMES, WeightsError, find_architecture


@pytest.mark.parametrize("name", NAMES)
def test_head_and_last_stage_are_parts_of_the_network(name):
    """Catches a prefix that fits nothing: fine-tuning would train the head alone, or nothing."""
    architecture, names = small_architecture(name), [n for n, _ in small_network(name, 5).named_parameters()]
    for prefix in (architecture.head, *architecture.last_stage):
        assert any(name.startswith(prefix) for name in names), prefix
    assert not any(name.startswith(architecture.head) for name, _ in small_network(name).named_parameters())


def test_the_last_stage_of_a_family_is_its_last_block():
    for name in ("efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2"):
        network = small_network(name)
        assert find_architecture(name).last_stage[0] == f"_blocks.{len(network._blocks) - 1}."


def test_names():
    assert tuple(a.name for a in ARCHITECTURES) == NAMES
    with pytest.raises(WeightsError, match="no pretrained network 'vgg': choose one of resnet18"):
        find_architecture("vgg")
