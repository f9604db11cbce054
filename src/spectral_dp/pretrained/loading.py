"""Puts published weights into a network, all of them, or says what does not fit and which network they look like."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from spectral_dp.pretrained.architectures import ARCHITECTURES, Architecture
from spectral_dp.pretrained.errors import WeightsError

_COUNTER = "num_batches_tracked"  # of BatchNorm: of no use in evaluation, and missing in old files


def load_state(network: nn.Module, architecture: Architecture, state: Mapping[str, Tensor], name: str) -> nn.Module:
    """Loads weights into a network and returns it.

    A head in the file is dropped if the network has none, or one for another number of classes. The network's own head
    then stays as it was initialised. Everything else must be there, and of the right shape.

    Args:
        network: The network, as ``architecture.build`` makes it.
        architecture: Which network it is.
        state: The weights by their names.
        name: Name of the file, for messages.

    Raises:
        WeightsError: The weights are of another network. The message says of which, if we know it.
    """
    expected, given = network.state_dict(), state
    state = {key: value for key, value in state.items() if not key.startswith(architecture.unused or ("\0",))}
    head = {key: value for key, value in expected.items() if key.startswith(architecture.head)}
    if any(key not in state or state[key].shape != value.shape for key, value in head.items()) or not head:
        state = {key: value for key, value in state.items() if not key.startswith(architecture.head)} | head
    for key, value in expected.items():
        if key.endswith(_COUNTER):
            state.setdefault(key, value)
    if differences := _differences(state, expected):
        likely = looks_like(given)
        hint = f"It looks like {likely}: ask for that network" if likely else "It looks like no network that we know"
        raise WeightsError(f"{name} does not hold weights of {architecture.name}: {differences}. {hint}")
    bad = [key for key, value in state.items() if value.is_floating_point() and not bool(value.isfinite().all())]
    if bad:
        raise WeightsError(f"{name} is damaged: {bad[0]} holds NaN or infinite numbers. Get it again")
    network.load_state_dict(state, strict=True)
    return network


def _differences(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Returns what does not fit, or nothing if all does."""
    parts = []
    missing, strangers = [k for k in expected if k not in state], [k for k in state if k not in expected]
    reshaped = [k for k in expected if k in state and state[k].shape != expected[k].shape]
    for what, keys in (("missing", missing), ("unknown", strangers)):
        if keys:
            parts.append(f"{len(keys)} of its names are {what} ({keys[0]}, ...)")
    if reshaped:
        key = reshaped[0]
        parts.append(f"{key} is {tuple(state[key].shape)}, not {tuple(expected[key].shape)}")
    return "; ".join(parts)


def looks_like(state: Mapping[str, Tensor]) -> str | None:
    """Returns the name of the network that most of these weights fit, or None if they fit none."""
    fits = {}
    for name, shapes in _shapes().items():
        same = sum(key in state and tuple(state[key].shape) == shape for key, shape in shapes.items())
        fits[name] = same / max(len(shapes), len(state))
    best = max(fits, key=lambda name: fits[name])
    return best if fits[best] > 0.8 else None


@lru_cache
def _shapes() -> dict[str, dict[str, tuple[int, ...]]]:
    """The shape of every tensor of every network, without their heads."""
    with torch.device("meta"):
        return {
            architecture.name: {key: tuple(value.shape) for key, value in architecture.build().state_dict().items()}
            for architecture in ARCHITECTURES
        }
