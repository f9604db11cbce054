"""Sound Spectral-DP: differentially private training with spectral clipping, noise and filtering."""

from spectral_dp._version import __version__
from spectral_dp.clipping import Clipped, clip_and_sum, clip_each
from spectral_dp.filters import Adaptive, Annealed, Filter, Gains, LowPass, PaperBand, Shaped
from spectral_dp.mechanism import perturb, perturb_sum
from spectral_dp.noise import NoiseSource, SecureNoise, SeededNoise
from spectral_dp.relations import Relation
from spectral_dp.transforms import Transform, get_transform

__all__ = [
    "Adaptive",
    "Annealed",
    "Clipped",
    "Filter",
    "Gains",
    "LowPass",
    "NoiseSource",
    "PaperBand",
    "Relation",
    "SecureNoise",
    "SeededNoise",
    "Shaped",
    "Transform",
    "__version__",
    "clip_and_sum",
    "clip_each",
    "get_transform",
    "perturb",
    "perturb_sum",
]
