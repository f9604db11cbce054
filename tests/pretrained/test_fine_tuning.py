"""One private step of every network, for every part that can be trained."""

import pytest
import torch
from tests.support.pretrained import SMALL, small_architecture, small_inputs, small_network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine, SpectralConfig
from spectral_dp.pretrained import NAMES, add_low_rank, find_architecture, train_only

IMAGES = [name for name in NAMES if name != "minilm-l6"]
CASES = [
    *((name, "last-stage") for name in NAMES if name not in ("efficientnet-lite1", "efficientnet-lite2")),
    *((name, part) for name in SMALL for part in ("head", "biases", "all")),
    *((name, "last-block") for name in ("resnet18", "mobilenet-v2", "resnext29", "minilm-l6")),
    ("minilm-l6", "lora"),
]


def private_step(network, inputs, spectral=None, **options):
    """Makes one step and returns the names of the parameters that it changed."""
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    labels = torch.arange(len(inputs)) % 3
    model, optimizer, loader = PrivacyEngine().make_private(
        module=network,
        optimizer=torch.optim.SGD(trained, lr=0.1),
        data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=len(inputs)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        spectral=spectral,
        **options,
    )
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {name for name, parameter in network.named_parameters() if not torch.equal(parameter, before[name])}


def trained_names(network):
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(("name", "part"), CASES)
def test_a_private_step_changes_what_is_trained_and_nothing_else(name, part):
    network = train_only(small_network(name, 3), small_architecture(name), part)
    spectral = SpectralConfig(conv_ratio=0.3) if name in IMAGES and part in ("last-stage", "all") else None
    buffers = {key: value.clone() for key, value in network.named_buffers()}
    rehearsal = part == "last-stage"  # which every network has: it asks what the whole network makes of records
    assert private_step(network, small_inputs(name), spectral, rehearsal=rehearsal) == trained_names(network)
    assert all(torch.equal(value, buffers[key]) for key, value in network.named_buffers())


@pytest.mark.parametrize("norms", ["frozen", "group"])
def test_batch_norm_is_converted_where_it_is_trained(norms):
    network = train_only(small_network("resnet18", 3), small_architecture("resnet18"), "last-stage", norms=norms)
    kinds = {
        name.split(".")[0]: type(module).__name__
        for name, module in network.named_modules()
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm)
    }
    trained = "FrozenBatchNorm2d" if norms == "frozen" else "GroupNorm"
    assert kinds == dict.fromkeys(("bn1", "layer1", "layer2", "layer3"), "FrozenBatchNorm2d") | {"layer4": trained}


def test_a_network_begins_as_it_was_published():
    network, images = small_network("wrn-28-10", 3), small_inputs("wrn-28-10")
    expected = network(images)
    assert torch.allclose(train_only(network, small_architecture("wrn-28-10"), "all")(images), expected, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_last_block_is_a_part_of_the_last_stage(name):
    architecture = find_architecture(name)
    with torch.device("meta"):
        names = [key for key, _ in architecture.build(3).named_parameters()]
    block, stage = (
        {key for key in names if key.startswith(part)} for part in (architecture.last_block, architecture.last_stage)
    )
    assert block
    assert block <= stage
    assert all(
        any(key.startswith(part) for key in names) for part in (*architecture.last_block, *architecture.last_stage)
    )


def test_the_last_block_of_resnet18_is_what_the_paper_trains_as_transfer2():
    """Transfer2 trains the last two convolutions, and Transfer3 the last four (and the shortcut beside them)."""
    for part, expected in (("last-block", 2), ("last-stage", 4)):
        network = train_only(small_network("resnet18", 3), small_architecture("resnet18"), part)
        trained = [m for m in network.modules() if isinstance(m, nn.Conv2d) and m.weight.requires_grad]
        assert sum(m.kernel_size == (3, 3) for m in trained) == expected


def test_low_rank_additions_of_a_text_encoder():
    network = train_only(small_network("minilm-l6", 3), small_architecture("minilm-l6"), "head")
    add_low_rank(network, rank=2)
    changed = private_step(network, small_inputs("minilm-l6"))
    # What is multiplied by zero has no gradient yet, but it is noised like everything else.
    assert changed == trained_names(network)


def test_low_rank_additions_by_peft():
    peft = pytest.importorskip("peft")
    network = train_only(small_network("minilm-l6", 3), small_architecture("minilm-l6"), "head")
    config = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"], r=2, lora_dropout=0.0)
    adapted = peft.get_peft_model(network, config)
    assert private_step(adapted, small_inputs("minilm-l6")) == trained_names(adapted)


def test_bad_input():
    architecture = small_architecture("wrn-28-10")
    with pytest.raises(ValueError, match="'tail': choose one of head, last-block, last-stage, biases, lora, all"):
        train_only(small_network("wrn-28-10", 3), architecture, "tail")
    with pytest.raises(ValueError, match="wrn-28-10 has no head to train: build it with classes="):
        train_only(small_network("wrn-28-10"), architecture, "head")
    with pytest.raises(ValueError, match="wrn-28-10 has no attention that lora adds to"):
        train_only(small_network("wrn-28-10", 3), architecture, "lora")
