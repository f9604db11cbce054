"""Public priors: images that a program draws, and what can be known from them before any private record is read.

- ``generator`` is the base class of what draws images. ``leaves``, ``strokes`` and ``noise_fields`` draw them.
- ``images`` gives generated images as bytes, by the name of their prior and a seed.
- ``dictionary`` learns the patches that generated images consist of, in the mirror coordinates of ``patches``.
- ``spectrum`` has the principal axes of vectors, and gains along them; ``generated_spectrum`` has those of features of
  generated images.

Formal guarantee. Nothing here reads a private record: what is computed from generated images is public. It is not
released, nothing of it is charged to a privacy budget, and it may be used in every step.
"""

from spectral_dp.priors.generated_spectrum import spectrum_of
from spectral_dp.priors.generator import ImagePrior
from spectral_dp.priors.images import PRIORS, generate_images, get_prior, image_batches, prior_assumption
from spectral_dp.priors.leaves import DeadLeaves
from spectral_dp.priors.noise_fields import OneOverF, WhiteNoise
from spectral_dp.priors.spectrum import Spectrum, principal_axes
from spectral_dp.priors.strokes import PenStrokes

__all__ = [
    "PRIORS",
    "DeadLeaves",
    "ImagePrior",
    "OneOverF",
    "PenStrokes",
    "Spectrum",
    "WhiteNoise",
    "generate_images",
    "get_prior",
    "image_batches",
    "principal_axes",
    "prior_assumption",
    "spectrum_of",
]
