"""Weights that were found, in the cache or in a file of the user's, and the network that they make."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from spectral_dp.pretrained.architectures import Means, find_architecture
from spectral_dp.pretrained.catalog import VOCABULARY, find_weights_info
from spectral_dp.pretrained.errors import WeightsError
from spectral_dp.pretrained.loading import load_state
from spectral_dp.pretrained.reading import read_file, read_state
from spectral_dp.pretrained.store import edition_of, place_of_weights, read_origin
from spectral_dp.pretrained.wordpiece import WordPiece

_MEANING = (
    "These data are taken to be public: the guarantee covers the records of this run alone, and neither protects those "
    "who are in the data of the pretraining nor holds for a record that is in both"
)


@dataclass(frozen=True)
class PretrainedWeights:
    """Weights of a network in a file.

    Attributes:
        name: Name of the network.
        path: The file.
        sha256: Its checksum; the file is compared with it whenever it is read.
        mean: Mean of pixels from 0 to 1 that the weights expect.
        std: Deviation likewise.
        options: Options of the network that the weights need.
        assumption: What the privacy statement says of where they come from.
    """

    name: str
    path: Path
    sha256: str
    mean: Means
    std: Means
    options: Mapping[str, Any] = field(default_factory=dict)
    assumption: str = ""

    def network(self, classes: int | None = None) -> nn.Module:
        """Returns the network with these weights, in evaluation mode.

        Args:
            classes: Number of classes of a head. If None, there is no head. A head of another size than the published
                one is freshly initialised.
        """
        architecture = find_architecture(self.name)
        content = read_file(self.path)
        if (found := hashlib.sha256(content).hexdigest()) != self.sha256:
            raise WeightsError(f"{self.path} was changed since it was found: sha256 {found}, not {self.sha256}")
        network = architecture.build(classes, **self.options)
        return load_state(network, architecture, read_state(content, str(self.path)), str(self.path)).eval()

    def tokenizer(self) -> WordPiece:
        """Returns the tokenizer whose vocabulary lies beside the weights."""
        return WordPiece.read(self.path.parent / VOCABULARY)


def find_weights(
    name: str, path: str | os.PathLike[str] | None = None, *, cache: str | os.PathLike[str] | None = None
) -> PretrainedWeights:
    """Finds the weights of a network.

    Args:
        name: Name of the network.
        path: A file of the user's, which is loaded once to see whether it fits. If None, the weights are those that
            ``spectral-dp weights get`` put into the cache.
        cache: Cache directory to use instead of the user's.

    Raises:
        WeightsError: There is no such network, or its weights are not there, damaged or of another network.
    """
    architecture = find_architecture(name)
    mean, std = architecture.normalization
    if path is not None:
        sha256 = hashlib.sha256(read_file(Path(path))).hexdigest()
        vouched = (
            f"a pretrained network {name}, with weights of the user's own (sha256 {sha256}), who vouches for the data "
            f"that they were trained on. {_MEANING}"
        )
        found = PretrainedWeights(name, Path(path), sha256, mean, std, assumption=vouched)
        _require_loadable(name, str(path), sha256)
        return found
    info, origin = find_weights_info(name), read_origin(name, cache)
    edition = edition_of(name, origin)
    mean, std = edition.normalization or (mean, std)
    file = edition.files[0].name
    remark = f"; {edition.remark}" if edition.remark else ""
    assumption = (
        f"a pretrained network {name}, published by {info.publisher} under {info.licence}, trained on "
        f"{info.trained_on} ({info.data}){remark}. {_MEANING}"
    )
    place = place_of_weights(name, cache)
    return PretrainedWeights(name, place / file, origin["files"][file], mean, std, dict(edition.options), assumption)


@lru_cache
def _require_loadable(name: str, path: str, sha256: str) -> None:
    """Loads weights of the user's once, so that what does not fit is found before anything is computed with it."""
    mean, std = find_architecture(name).normalization
    PretrainedWeights(name, Path(path), sha256, mean, std).network()
