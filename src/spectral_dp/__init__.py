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

The public names, and the rooms as attributes, are imported when they are first used, so that
``spectral-dp --help`` does not wait for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from spectral_dp._version import __version__ as __version__

if TYPE_CHECKING:  # `as` marks a name as public for type checkers
    from spectral_dp.accounting.budget import BudgetExhausted as BudgetExhausted
    from spectral_dp.errors import SpectralDPError as SpectralDPError
    from spectral_dp.gradients import LayerConfig as LayerConfig
    from spectral_dp.layers import BlockCirculantLinear as BlockCirculantLinear
    from spectral_dp.layers import convert_linear as convert_linear
    from spectral_dp.mechanism.clipping import AutomaticClipping as AutomaticClipping
    from spectral_dp.mechanism.clipping import Clipped as Clipped
    from spectral_dp.mechanism.clipping import FlatClipping as FlatClipping
    from spectral_dp.mechanism.clipping import NonFiniteWarning as NonFiniteWarning
    from spectral_dp.mechanism.clipping import PerLayerClipping as PerLayerClipping
    from spectral_dp.mechanism.clipping import clip_and_sum as clip_and_sum
    from spectral_dp.mechanism.clipping import clip_each as clip_each
    from spectral_dp.mechanism.eigenvalue_filter import EigenvalueFilter as EigenvalueFilter
    from spectral_dp.mechanism.filters import AdaptiveFilter as AdaptiveFilter
    from spectral_dp.mechanism.filters import AnnealedFilter as AnnealedFilter
    from spectral_dp.mechanism.filters import Filter as Filter
    from spectral_dp.mechanism.filters import LowPassFilter as LowPassFilter
    from spectral_dp.mechanism.filters import PaperBandFilter as PaperBandFilter
    from spectral_dp.mechanism.filters import ShapedFilter as ShapedFilter
    from spectral_dp.mechanism.gains import Gains as Gains
    from spectral_dp.mechanism.noise import NoiseSource as NoiseSource
    from spectral_dp.mechanism.noise import SecureNoise as SecureNoise
    from spectral_dp.mechanism.noise import SeededNoise as SeededNoise
    from spectral_dp.mechanism.perturbation import perturb as perturb
    from spectral_dp.mechanism.perturbation import perturb_sum as perturb_sum
    from spectral_dp.mechanism.public_basis import PublicBasis as PublicBasis
    from spectral_dp.mechanism.transforms import Transform as Transform
    from spectral_dp.mechanism.transforms import get_transform as get_transform
    from spectral_dp.relations import Relation as Relation
    from spectral_dp.training.checkpoint import CheckpointError as CheckpointError
    from spectral_dp.training.config import SpectralConfig as SpectralConfig
    from spectral_dp.training.engine import PrivacyEngine as PrivacyEngine
    from spectral_dp.training.rehearsal import RehearsalError as RehearsalError
    from spectral_dp.training.sampling import PoissonLoader as PoissonLoader

_HOMES = {
    "accounting.budget": ["BudgetExhausted"],
    "errors": ["SpectralDPError"],
    "gradients": ["LayerConfig"],
    "layers": ["BlockCirculantLinear", "convert_linear"],
    "mechanism.clipping": [
        "AutomaticClipping",
        "Clipped",
        "FlatClipping",
        "NonFiniteWarning",
        "PerLayerClipping",
        "clip_and_sum",
        "clip_each",
    ],
    "mechanism.eigenvalue_filter": ["EigenvalueFilter"],
    "mechanism.filters": [
        "AdaptiveFilter",
        "AnnealedFilter",
        "Filter",
        "LowPassFilter",
        "PaperBandFilter",
        "ShapedFilter",
    ],
    "mechanism.gains": ["Gains"],
    "mechanism.noise": ["NoiseSource", "SecureNoise", "SeededNoise"],
    "mechanism.perturbation": ["perturb", "perturb_sum"],
    "mechanism.public_basis": ["PublicBasis"],
    "mechanism.transforms": ["Transform", "get_transform"],
    "relations": ["Relation"],
    "training.checkpoint": ["CheckpointError"],
    "training.config": ["SpectralConfig"],
    "training.engine": ["PrivacyEngine"],
    "training.rehearsal": ["RehearsalError"],
    "training.sampling": ["PoissonLoader"],
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take every name that it cannot read in this list for a private one
    __all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value  # the next look-up does not come here
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:  # a room
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
