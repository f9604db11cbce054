"""Checkpoints: model, optimizer, ledger and sampler saved together, whole or not at all, and sealed together.

The seal is a digest of everything in the file. Weights of one checkpoint beside the ledger of another, an edited noise
multiplier and a flipped bit (which ``torch.load`` does not notice) all break it. It holds no secret: whoever controls
the disk can seal what they like.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spectral_dp.errors import SpectralDPError
from spectral_dp.files import whole_file

FORMAT = "spectral-dp checkpoint"
VERSION = 3  # 1 and 2, which were never published, had no seal and no schedules


class CheckpointError(SpectralDPError, ValueError):
    """A checkpoint that cannot be used, with the reason."""


def save(state: Mapping[str, Any], path: str | os.PathLike[str], **torch_save_kwargs: Any) -> None:
    """Seals a checkpoint and writes it atomically: at any moment the path holds the old file or the new one, whole."""
    state = _plain(state)
    whole = {**state, "format": FORMAT, "version": VERSION, "seal": seal(state)}
    with whole_file(path) as file:
        torch.save(whole, file, **torch_save_kwargs)


def load(path: str | os.PathLike[str], **torch_load_kwargs: Any) -> dict[str, Any]:
    """Reads what :func:`save` was given. Nothing in the file is executed (``weights_only=True``).

    Raises:
        CheckpointError: If the file is truncated, damaged, changed, or no checkpoint of this library and version.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice about files it did not write, which are refused below
            state = torch.load(path, **{"weights_only": True, "map_location": "cpu", **torch_load_kwargs})
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can end in any of them: IndexError, TypeError, AttributeError, ...
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} is truncated, damaged or not a checkpoint: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this library: save it with PrivacyEngine.save_checkpoint")
    _, version, sealed = (state.pop(name, None) for name in ("format", "version", "seal"))
    if version != VERSION:
        raise CheckpointError(
            f"{path} has format version {version}, this library reads {VERSION}: resume it with the version of "
            "spectral-dp that wrote it, or start a new run"
        )
    if seal(state) != sealed:
        raise CheckpointError(
            f"{path} is damaged or was changed: its contents do not match its seal. Take a copy that is whole; to keep "
            "values of your own with a checkpoint, use checkpoint_dict"
        )
    return state


def seal(state: Mapping[str, Any]) -> str:
    """Returns the SHA-256 digest of a checkpoint's contents: names, values and order, whatever device they are on.

    It takes 0.6 to 0.9 s a gigabyte, when saving and again when loading: about as long as ``torch.save`` to memory.
    """
    digest = hashlib.sha256()
    _fold(state, digest)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, such as a learning rate from ``np.logspace``: only these can be read back."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if type(value) is dict else value


def _fold(value: Any, digest: Any) -> None:
    """Adds a value to a digest. Kind and length come first, so that no two values read the same."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise CheckpointError(f"a checkpoint holds dense tensors, got layout {value.layout}: use to_dense()")
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}\n".encode())
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(plain.view(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\n".encode())
        for pair in value.items():
            for part in pair:
                _fold(part, digest)
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}\n".encode())
        for part in value:
            _fold(part, digest)
    elif value is None or type(value) in (bool, int, float, str, bytes):
        text = repr(value).encode()
        digest.update(f"{type(value).__name__} {len(text)}\n".encode() + text)
    else:
        raise CheckpointError(
            f"a checkpoint holds tensors and plain types (numbers, text, lists, dicts), got a {type(value).__name__}: "
            "save its state_dict() or its value"
        )


def require_equal(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises :class:`CheckpointError` with every setting in which a checkpoint differs from the run that loads it."""
    differences = [
        f"{name}: saved {saved.get(name)!r}, now {current.get(name)!r}"
        for name in dict.fromkeys((*saved, *current))
        if saved.get(name) != current.get(name)
    ]
    if differences:
        listed = "\n  - ".join(differences)
        raise CheckpointError(
            f"the checkpoint was saved by a run with other settings:\n  - {listed}\nMake the engine private with the "
            "saved settings, or start a new run"
        )
