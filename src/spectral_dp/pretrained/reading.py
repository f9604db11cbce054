"""Reads files of weights without running anything that they hold.

A published file is safetensors, which holds nothing but numbers, or a pickle of torch. A pickle is a program, so torch
reads it with ``weights_only``: tensors and plain containers, and any other name is refused.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectral_dp.pretrained.errors import WeightsError

State = dict[str, Tensor]
"""Tensors by the names of their parameters and buffers."""

#: Under these names training scripts put the weights beside other things.
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")

#: What wrappers of a network put before all of its names, such as ``DataParallel``.
_PREFIXES = ("module.", "_orig_mod.", "model.", "0.auto_model.", "bert.")


def read_state(content: bytes, name: str) -> State:
    """Returns the tensors of a file.

    Args:
        content: Content of the file.
        name: Its name, for messages.

    Raises:
        WeightsError: The file is truncated or damaged, asks for more than tensors, or holds no weights.
    """
    if len(content) > 8 and content[8:9] == b"{":  # behind the length of its header
        found = _read_safetensors(content, name)
    elif content[:2] in (b"PK", b"\x80\x02"):
        found = _read_pickle(content, name)
    else:
        raise WeightsError(f"{name} is no file of weights: give a .safetensors file, or a .pth file of torch")
    return _tensors(found, name)


def read_file(path: Path) -> bytes:
    """Returns the content of a file of weights."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise WeightsError(f"cannot read the weights {path}: {error.strerror or error}") from error


def _read_safetensors(content: bytes, name: str) -> State:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load
    except ImportError as error:
        raise WeightsError(
            f"{name} is a safetensors file, and the package is missing: pip install 'spectral-dp[cli]'"
        ) from error

    try:
        return load(content)
    except SafetensorError as error:
        raise WeightsError(f"{name} is truncated or damaged: {error}. Get it again") from error


def _read_pickle(content: bytes, name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats: what is read is plain tensors all the same
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).splitlines()[0])
        raise WeightsError(
            f"{name} is refused: it holds more than tensors, and to read it would run it ({reason.strip()}). Save the "
            "state_dict of the model alone, with torch.save or safetensors"
        ) from error
    except Exception as error:  # a damaged file raises whatever its parts happen to do
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise WeightsError(f"{name} is truncated or damaged ({reason}). Get it again") from error


def _tensors(found: Any, name: str) -> State:
    """Takes the tensors out of wrappers, and wrappers off their names."""
    for wrapper in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping):
        raise WeightsError(f"{name} holds a {type(found).__name__}, not tensors by name: save the model's state_dict")
    state = {str(key): value for key, value in found.items() if isinstance(value, Tensor)}
    if not state:
        raise WeightsError(f"{name} holds no tensors: save the model's state_dict")
    while prefix := next((p for p in _PREFIXES if all(key.startswith(p) for key in state)), None):
        state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state
