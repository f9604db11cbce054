"""Public priors: images that a program draws, and what can be known from them before any private record is read.

- ``generator`` is the base class of what draws images. ``leaves``, ``strokes`` and ``noise_fields`` draw them.
- ``images`` gives generated images as bytes, by the name of their prior and a seed.
- ``dictionary`` learns the patches that generated images consist of, in the mirror coordinates of ``patches``.
- ``spectrum`` has the principal axes of vectors, and gains along them; ``generated_spectrum`` has those of features of
  generated images.

Formal guarantee. Nothing here reads a private record: what is computed from generated images is public. It is not
released, nothing of it is charged to a privacy budget, and it may be used in every step.
"""

from spectral_dp.priors.generated_spectrum import spectrum_of as spectrum_of
from spectral_dp.priors.generator import ImagePrior as ImagePrior
from spectral_dp.priors.images import PRIORS as PRIORS
from spectral_dp.priors.images import generate_images as generate_images
from spectral_dp.priors.images import get_prior as get_prior
from spectral_dp.priors.images import image_batches as image_batches
from spectral_dp.priors.images import prior_assumption as prior_assumption
from spectral_dp.priors.leaves import DeadLeaves as DeadLeaves
from spectral_dp.priors.noise_fields import OneOverF as OneOverF
from spectral_dp.priors.noise_fields import WhiteNoise as WhiteNoise
from spectral_dp.priors.spectrum import Spectrum as Spectrum
from spectral_dp.priors.spectrum import principal_axes as principal_axes
from spectral_dp.priors.strokes import PenStrokes as PenStrokes
