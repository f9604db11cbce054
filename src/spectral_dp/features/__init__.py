"""Features of frozen front ends: computed once, kept on the disk, read as they are needed.

- ``extractor`` is the protocol of a front end: a name, settings, the shape of what comes out, and a module.
- ``scattering`` is one, on the wavelets of ``kymatio_filters``; ``patches`` is another, on patches of generated images;
  ``backbone``, a pretrained network, a third; ``pixels`` and ``hashed_words`` are the plainest, for images and for
  texts. ``registry`` has all of them by name, and ``upright`` straightens written characters before any of them.
- ``extraction`` computes features, by several processes, into a ``cache``; ``views`` are augmented images.
- ``prepared``, ``projected`` and ``weighted`` are stages from cached features to what a head reads: normalised, in the
  basis of a public ``spectrum``, and with gains there. ``pipeline`` puts front end and stages together.
- ``rows`` are parts and views of caches, ``dataset`` puts labels to them, and ``datasets`` finds the features of the
  catalog's data sets in the user's cache directory.
- ``normalization`` has the statistics of channels: public ones, or private ones that are released and charged;
  ``axis_normalization`` makes gains of axes from such statistics of coordinates.
"""

from spectral_dp.features.backbone import Backbone as Backbone
from spectral_dp.features.dataset import FeatureDataset as FeatureDataset
from spectral_dp.features.errors import FeatureError as FeatureError
from spectral_dp.features.extraction import ExtractionProgress as ExtractionProgress
from spectral_dp.features.extraction import extract_features as extract_features
from spectral_dp.features.extractor import Extractor as Extractor
from spectral_dp.features.hashed_words import HashedWords as HashedWords
from spectral_dp.features.normalization import ChannelStatistics as ChannelStatistics
from spectral_dp.features.normalization import private_channel_statistics as private_channel_statistics
from spectral_dp.features.normalization import public_channel_statistics as public_channel_statistics
from spectral_dp.features.patches import DictionarySettings as DictionarySettings
from spectral_dp.features.patches import Patches as Patches
from spectral_dp.features.pixels import Pixels as Pixels
from spectral_dp.features.prepared import Prepared as Prepared
from spectral_dp.features.projected import Projected as Projected
from spectral_dp.features.registry import ImageFacts as ImageFacts
from spectral_dp.features.registry import build_extractor as build_extractor
from spectral_dp.features.registry import extractor_entry as extractor_entry
from spectral_dp.features.registry import extractor_names as extractor_names
from spectral_dp.features.registry import register_extractor as register_extractor
from spectral_dp.features.rows import FeatureRows as FeatureRows
from spectral_dp.features.scattering import Scattering as Scattering
from spectral_dp.features.spectrum import generated_spectrum as generated_spectrum
from spectral_dp.features.upright import Upright as Upright
from spectral_dp.features.weighted import Weighted as Weighted
