"""Features of frozen front ends: computed once, kept on the disk, read as they are needed.

- ``extractor`` is the protocol of a front end: a name, settings, the shape of what comes out, and a module.
- ``scattering`` is one, on the wavelets of ``kymatio_filters``; ``patches`` is another, on patches of generated images;
  ``backbone``, a pretrained network, a third; ``pixels`` and ``hashed_words`` are the plainest, for images and for
  texts. ``registry`` has all of them by name.
- ``extraction`` computes features, by several processes, into a ``cache``; ``views`` are augmented images.
- ``prepared``, ``projected`` and ``weighted`` are stages from cached features to what a head reads: normalised, in the
  basis of a public ``spectrum``, and with gains there. ``pipeline`` puts front end and stages together.
- ``rows`` are parts and views of caches, ``dataset`` puts labels to them, and ``datasets`` finds the features of the
  catalog's data sets in the user's cache directory.
- ``normalization`` has the statistics of channels: public ones, or private ones that are released and charged.
"""

from spectral_dp.features.backbone import Backbone, pretrained_backbone
from spectral_dp.features.cache import FeatureCache
from spectral_dp.features.dataset import FeatureDataset
from spectral_dp.features.errors import FeatureError
from spectral_dp.features.extraction import ExtractionProgress, extract_features
from spectral_dp.features.extractor import Extractor
from spectral_dp.features.hashed_words import HashedWords
from spectral_dp.features.normalization import (
    ChannelNormalization,
    ChannelStatistics,
    private_channel_statistics,
    public_channel_statistics,
)
from spectral_dp.features.patches import DictionarySettings, Patches, PatchResponses
from spectral_dp.features.pipeline import extract_in_stages
from spectral_dp.features.pixels import Pixels
from spectral_dp.features.prepared import Prepared
from spectral_dp.features.projected import Projected
from spectral_dp.features.registry import (
    ExtractorEntry,
    ImageFacts,
    build_extractor,
    extractor_entry,
    extractor_names,
    register_extractor,
)
from spectral_dp.features.rows import FeatureRows, ViewsOfRows
from spectral_dp.features.scattering import Scattering, ScatteringTransform
from spectral_dp.features.spectrum import StoredSpectrum, generated_spectrum
from spectral_dp.features.views import VIEWS, View
from spectral_dp.features.weighted import Weighted

__all__ = [
    "VIEWS",
    "Backbone",
    "ChannelNormalization",
    "ChannelStatistics",
    "DictionarySettings",
    "ExtractionProgress",
    "Extractor",
    "ExtractorEntry",
    "FeatureCache",
    "FeatureDataset",
    "FeatureError",
    "FeatureRows",
    "HashedWords",
    "ImageFacts",
    "PatchResponses",
    "Patches",
    "Pixels",
    "Prepared",
    "Projected",
    "Scattering",
    "ScatteringTransform",
    "StoredSpectrum",
    "View",
    "ViewsOfRows",
    "Weighted",
    "build_extractor",
    "extract_features",
    "extract_in_stages",
    "extractor_entry",
    "extractor_names",
    "generated_spectrum",
    "pretrained_backbone",
    "private_channel_statistics",
    "public_channel_statistics",
    "register_extractor",
]
