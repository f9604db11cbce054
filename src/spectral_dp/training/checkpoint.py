"""Checkpoint files: model, optimizer, ledger and sampler are saved together in one sealed file.

The seal is a SHA-256 digest of everything in the file. It detects mistakes and damage, not attacks: it needs no secret
key, so anybody who can write to the disk can also write a new seal.

Files that :func:`load` refuses, and what protects against the rest:

====================================================================  =================================================
The file                                                              What happens
====================================================================  =================================================
was written only in part (the process was killed)                     impossible: a complete file replaces the old one
is truncated, or was not written by ``torch.save``                    ``CheckpointError``
was written by another library, or by another version of the format   ``CheckpointError``
has a flipped bit, which ``torch.load`` does not notice               ``CheckpointError``: the seal does not match
has an edited value, or the ledger of another checkpoint              ``CheckpointError``: the seal does not match
contains code to execute                                              ``CheckpointError``; the code does not run
is whole, but belongs to another run or other settings                refused by :class:`~spectral_dp.training.run.Run`
====================================================================  =================================================
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
    """Raised when a checkpoint cannot be used. The message says why."""


def save(state: Mapping[str, Any], path: str | os.PathLike[str], **torch_save_kwargs: Any) -> None:
    """Seals a checkpoint and writes it atomically: at any moment the path holds the complete old or new file.

    Args:
        state: The contents of the checkpoint: tensors and plain types (numbers, text, lists, dicts), nested.
        path: The file to write.
        **torch_save_kwargs: Arguments for ``torch.save``.

    Raises:
        CheckpointError: If the state holds a value of another type, or a sparse tensor.
    """
    whole = sealed(state)
    with whole_file(path) as file:
        torch.save(whole, file, **torch_save_kwargs)


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint with its seal, as :func:`save` writes it and as it may be kept in another file."""
    state = _plain(state)
    return {**state, "format": FORMAT, "version": VERSION, "seal": seal(state)}


def load(path: str | os.PathLike[str], **torch_load_kwargs: Any) -> dict[str, Any]:
    """Returns the state that :func:`save` wrote. By default (``weights_only=True``), no code in the file is executed.

    Args:
        path: The file to read.
        **torch_load_kwargs: Arguments for ``torch.load``.

    Raises:
        CheckpointError: If the file is refused; see the table of this module.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about foreign files, which are refused below
            state = torch.load(path, **{"weights_only": True, "map_location": "cpu", **torch_load_kwargs})
    except (FileNotFoundError, PermissionError, IsADirectoryError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle can raise anything: IndexError, TypeError, ...
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} is truncated, damaged or not a checkpoint: {reason}") from error
    return unsealed(state, str(path))


def unsealed(state: Any, name: str) -> dict[str, Any]:
    """Returns the state that :func:`sealed` was given.

    Args:
        state: The value that :func:`sealed` returned.
        name: The name of the state in error messages.

    Raises:
        CheckpointError: If the state is refused; see the table of this module.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{name} is not a checkpoint of this library: save it with PrivacyEngine.save_checkpoint")
    state = dict(state)
    _, version, digest = (state.pop(key, None) for key in ("format", "version", "seal"))
    if version != VERSION:
        raise CheckpointError(
            f"{name} has format version {version}, this library reads {VERSION}: resume it with the version of "
            "spectral-dp that wrote it, or start a new run"
        )
    if seal(state) != digest:
        raise CheckpointError(
            f"{name} is damaged or was changed: its contents do not match its seal. Take a copy that is whole; to keep "
            "values of your own with a checkpoint, use checkpoint_dict"
        )
    return state


def seal(state: Mapping[str, Any]) -> str:
    """Returns the SHA-256 digest of a checkpoint's names and values, in their order. The device does not matter.

    It takes 0.6 to 0.9 s per gigabyte, once for saving and once for loading, about as long as ``torch.save`` to memory.
    """
    digest = hashlib.sha256()
    _fold(state, digest)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Replaces NumPy numbers (a learning rate from ``np.logspace``) by Python numbers, which ``load`` can read."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {k: _plain(v) for k, v in value.items()} if type(value) is dict else value


def _fold(value: Any, digest: Any) -> None:
    """Adds a value to a digest. Its type and length come first, so that two different values never look the same."""
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
    """Raises a :class:`CheckpointError` that lists all settings in which a checkpoint and a run differ, if any do."""
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
