"""Sound Spectral-DP: differentially private training with spectral clipping, noise and filtering.

The rooms, from the ground up; imports point from later rooms to earlier ones only:

- ``accounting``: what private training spends.
- ``mechanism``: transform, filter, clip, sum, noise (Algorithm 1).
- ``priors``: generated images, and the bases and dictionaries that are learnt from them.
- ``layers``: block-circulant linear layers.
- ``gradients``: norms and clipped sums of per-sample gradients, a rule for each kind of layer (Algorithms 2 and 3).
- ``training``: Poisson batches, the private step, ``PrivacyEngine``, checkpoints (Algorithm 4).
- ``utils`` and ``validators``: what scripts import of Opacus besides the engine, under the same paths.
- ``integrations``: private training inside the trainers of transformers and Lightning; each needs its extra.
- ``audit``: attempts to prove a claimed epsilon wrong.
- ``data``, ``pretrained``, ``features``, ``models``, ``experiments``, ``cli``: the application on top, which needs the
  extra ``spectral-dp[cli]``.

The public names, which ``_public`` lists, and the rooms as attributes are imported when the first of them is used, so
that ``spectral-dp --help`` does not wait for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from spectral_dp._version import __version__ as __version__

if TYPE_CHECKING:
    from spectral_dp._public import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:  # a room
        return import_module(f"{__name__}.{name}")
    public = _public_names()
    globals().update(public)  # the next look-up does not come here
    if name == "__all__":
        return ["__version__", *public]
    if name in public:
        return public[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_public_names()})


def _public_names() -> dict[str, Any]:
    names = vars(import_module("spectral_dp._public"))
    return {name: value for name, value in names.items() if not name.startswith("_")}
