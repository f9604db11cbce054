"""Checkpoints: model, optimizer, ledger and sampler saved together, whole or not at all."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from spectral_dp.files import whole_file

FORMAT = "spectral-dp checkpoint"
VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, with the reason."""


def save(state: Mapping[str, Any], path: str | os.PathLike[str], **torch_save_kwargs: Any) -> None:
    """Writes a checkpoint atomically: at any moment the path holds the old file or the new one, whole."""
    with whole_file(path) as file:
        torch.save({"format": FORMAT, "version": VERSION, **state}, file, **torch_save_kwargs)


def load(path: str | os.PathLike[str], **torch_load_kwargs: Any) -> dict[str, Any]:
    """Reads a checkpoint. Nothing in the file is executed (``weights_only=True``).

    Raises:
        CheckpointError: If the file is truncated, damaged, or no checkpoint of this library.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice about files it did not write, which are refused below
            state = torch.load(path, **{"weights_only": True, "map_location": "cpu", **torch_load_kwargs})
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, ValueError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} is truncated, damaged or not a checkpoint: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this library: save it with PrivacyEngine.save_checkpoint")
    if state.get("version") != VERSION:
        raise CheckpointError(f"{path} has format version {state.get('version')}, this library reads {VERSION}")
    return state


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
