"""Sound Spectral-DP: differentially private training with spectral clipping, noise and filtering."""

from spectral_dp._version import __version__
from spectral_dp.budget import BudgetExhausted
from spectral_dp.checkpoint import CheckpointError
from spectral_dp.clipping import (
    AutomaticClipping,
    Clipped,
    FlatClipping,
    NonFiniteWarning,
    PerLayerClipping,
    clip_and_sum,
    clip_each,
)
from spectral_dp.config import SpectralConfig
from spectral_dp.engine import PrivacyEngine
from spectral_dp.filters import Adaptive, Annealed, Filter, LowPass, PaperBand, Shaped
from spectral_dp.gains import Gains
from spectral_dp.gradients import Spectral
from spectral_dp.layers import BlockCirculantLinear, convert_linear
from spectral_dp.mechanism import perturb, perturb_sum
from spectral_dp.noise import NoiseSource, SecureNoise, SeededNoise
from spectral_dp.rehearsal import RehearsalError
from spectral_dp.relations import Relation
from spectral_dp.sampling import PoissonLoader
from spectral_dp.transforms import Transform, get_transform

__all__ = [
    "Adaptive",
    "Annealed",
    "AutomaticClipping",
    "BlockCirculantLinear",
    "BudgetExhausted",
    "CheckpointError",
    "Clipped",
    "Filter",
    "FlatClipping",
    "Gains",
    "LowPass",
    "NoiseSource",
    "NonFiniteWarning",
    "PaperBand",
    "PerLayerClipping",
    "PoissonLoader",
    "PrivacyEngine",
    "RehearsalError",
    "Relation",
    "SecureNoise",
    "SeededNoise",
    "Shaped",
    "Spectral",
    "SpectralConfig",
    "Transform",
    "__version__",
    "clip_and_sum",
    "clip_each",
    "convert_linear",
    "get_transform",
    "perturb",
    "perturb_sum",
]
