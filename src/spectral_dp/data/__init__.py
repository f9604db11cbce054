"""The data sets of the paper and their kin, from published files verified by checksum."""

from spectral_dp.data.augment import random_views
from spectral_dp.data.cache import cache_directory
from spectral_dp.data.catalog import NAMES
from spectral_dp.data.dataset import ImageDataset
from spectral_dp.data.errors import DataError
from spectral_dp.data.fetch import fetch_dataset
from spectral_dp.data.load import load_dataset

__all__ = ["NAMES", "DataError", "ImageDataset", "cache_directory", "fetch_dataset", "load_dataset", "random_views"]
