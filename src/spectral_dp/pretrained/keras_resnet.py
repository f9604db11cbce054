"""ResNet-50 as Keras publishes it, turned into our parameters.

Keras differs from torch in four ways, and each has an exact counterpart in evaluation mode:

- kernels are ``(height, width, in, out)``: transposed;
- convolutions have a bias ``b``, followed by BatchNorm: its mean becomes ``mean - b``;
- BatchNorm has ``epsilon = 1e-3``: its variance becomes ``variance + 1e-3 - 1e-5``;
- images are blue, green, red: the channels of the first kernel are reversed.

The stride of a stage is in its first convolution (``resnet50(stride_first=True)``), and it reads pixels from 0 to 255
less a mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectral_dp.pretrained.architectures import Means
from spectral_dp.pretrained.errors import WeightsError

#: Mean and deviation of pixels from 0 to 1, red, green and blue: pixels from 0 to 255 less a mean.
KERAS: tuple[Means, Means] = ((123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255,) * 3)

_KERAS_EPSILON, _EPSILON = 1e-3, 1e-5
_DEPTHS = (3, 4, 6, 3)


def resnet50_from_keras(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Returns the parameters of ResNet-50 out of a model for TensorFlow.js, ``model.json`` and its shards."""
    arrays = _arrays(files)
    state: dict[str, Tensor] = {}
    _convolution(arrays, state, "conv1", "bn_conv1", "conv1", "bn1")
    state["conv1.weight"] = state["conv1.weight"].flip(1).contiguous()
    for stage, depth in enumerate(_DEPTHS):
        for block in range(depth):
            keras, ours = f"{stage + 2}{'abcdef'[block]}_branch", f"layer{stage + 1}.{block}."
            for number, branch in enumerate("abc", start=1):
                names = f"res{keras}2{branch}", f"bn{keras}2{branch}", f"{ours}conv{number}", f"{ours}bn{number}"
                _convolution(arrays, state, *names)
            if not block:
                shortcut = f"{ours}downsample.0", f"{ours}downsample.1"
                _convolution(arrays, state, f"res{keras}1", f"bn{keras}1", *shortcut)
    state["fc.weight"] = _tensor(arrays, "fc1000/kernel").T.contiguous()
    state["fc.bias"] = _tensor(arrays, "fc1000/bias")
    return state


def _convolution(
    arrays: Mapping[str, Any], state: dict[str, Tensor], conv: str, bn: str, our: str, our_bn: str
) -> None:
    state[f"{our}.weight"] = _tensor(arrays, f"{conv}/kernel").permute(3, 2, 0, 1).contiguous()
    state[f"{our_bn}.weight"] = _tensor(arrays, f"{bn}/gamma")
    state[f"{our_bn}.bias"] = _tensor(arrays, f"{bn}/beta")
    state[f"{our_bn}.running_mean"] = _tensor(arrays, f"{bn}/moving_mean") - _tensor(arrays, f"{conv}/bias")
    state[f"{our_bn}.running_var"] = _tensor(arrays, f"{bn}/moving_variance") + (_KERAS_EPSILON - _EPSILON)


def _tensor(arrays: Mapping[str, Any], name: str) -> Tensor:
    if name not in arrays:
        raise WeightsError(f"the model of Keras has no {name}: it is no ResNet-50")
    return torch.from_numpy(arrays[name])


def _arrays(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns the arrays by their names; the shards are one stream of numbers that was cut into files."""
    try:
        manifest = json.loads(files["model.json"])["weightsManifest"]
        arrays: dict[str, Any] = {}
        for group in manifest:
            stream, offset = b"".join(files[path] for path in group["paths"]), 0
            for entry in group["weights"]:
                if entry["dtype"] != "float32":
                    raise WeightsError(f"{entry['name']} is of type {entry['dtype']}, not float32")
                count = int(np.prod(entry["shape"]))
                array = np.frombuffer(stream, "<f4", count, offset).reshape(entry["shape"])
                arrays[entry["name"]], offset = array.astype(np.float32), offset + 4 * count
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"this is no model for TensorFlow.js, or it is damaged: {error!r}") from error
    return arrays
