"""Small forms of the pretrained networks, and weights that tests make."""

import hashlib
import io
from dataclasses import replace
from functools import partial

import torch
from safetensors.torch import save

from spectral_dp.pretrained import architectures, find_architecture
from spectral_dp.pretrained.catalog import PublishedFile, WeightsEdition, WeightsInfo

#: Options that make a network small enough to be trained in a test. The others have none, and small images must do.
SMALL = {
    "resnext29": {"groups": 2, "group_width": 4, "scale": 1},
    "wrn-28-10": {"depth": 10, "factor": 1},
    "minilm-l6": {"layers": 2, "width": 24, "heads": 2, "hidden": 48, "vocabulary": 50},
}


def small_architecture(name):
    architecture = find_architecture(name)
    last = ("encoder.layer.1.",)
    return replace(architecture, last_stage=last, last_block=last) if name == "minilm-l6" else architecture


def small_files(folder, monkeypatch):
    """Puts small forms in the place of the networks that have one; returns files with weights of each, by name."""
    files = {}
    for name, options in SMALL.items():
        files[name] = folder / f"{name}.safetensors"
        files[name].write_bytes(save(small_network(name, 5).state_dict()))
        small = replace(small_architecture(name), factory=partial(find_architecture(name).factory, **options))
        others = [other for other in architectures.ARCHITECTURES if other.name != name]
        monkeypatch.setattr(architectures, "ARCHITECTURES", (small, *others))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "film", "was", "good", "bad"]
    words += [f"word{number}" for number in range(SMALL["minilm-l6"]["vocabulary"] - len(words))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return files


def lively(network):
    """Gives BatchNorm statistics that are not those of a fresh layer."""
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return network.eval()


def small_network(name, classes=None):
    torch.manual_seed(0)
    return lively(small_architecture(name).build(classes, **SMALL.get(name, {})))


def small_inputs(name, samples=3):
    if find_architecture(name).reads == "text":
        return torch.randint(1, 50, (samples, 7))
    return torch.randn(samples, 3, 32, 32)


def state_of(name, classes=5):
    """Random weights of the whole network, as a file has them."""
    torch.manual_seed(0)
    return lively(find_architecture(name).build(classes)).state_dict()


def pickled(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def weights_content(name="mobilenet-v2", classes=5):
    return save(state_of(name, classes))


def published(content, address, name="mobilenet-v2", **changes):
    """A description of weights that lie below an address."""
    file = PublishedFile("weights.safetensors", hashlib.sha256(content).hexdigest(), len(content))
    edition = WeightsEdition("ours", (file,), mirrors=(address,))
    info = WeightsInfo(name, "the tests", "random numbers", "drawn by a generator", "Apache-2.0", (edition,))
    return replace(info, **changes)
