"""Pretrained networks for images and text, and their published weights.

- ``networks`` has the networks, with the parameter names under which weights are published, and ``architectures`` lists
  them by name.
- ``catalog`` lists the published weights with their checksums, ``store`` brings them into the user's cache directory,
  and ``weights`` finds them there or in a file of the user's.
- ``reading`` reads files of weights without running them, ``loading`` puts them into a network, and ``keras_resnet``
  makes weights out of those of Keras.
- ``wordpiece`` turns texts into numbers for the text encoder.
- ``fine_tuning`` prepares a network for private training, with ``frozen_norm`` in the place of BatchNorm,
  ``low_rank`` has LoRA, and ``folding`` makes a frozen network faster.
"""

from spectral_dp.pretrained.architectures import ARCHITECTURES, NAMES, Architecture, find_architecture
from spectral_dp.pretrained.errors import WeightsError
from spectral_dp.pretrained.fine_tuning import train_only
from spectral_dp.pretrained.low_rank import add_low_rank
from spectral_dp.pretrained.store import fetch_weights
from spectral_dp.pretrained.weights import PretrainedWeights, find_weights
from spectral_dp.pretrained.wordpiece import WordPiece

__all__ = [
    "ARCHITECTURES",
    "NAMES",
    "Architecture",
    "PretrainedWeights",
    "WeightsError",
    "WordPiece",
    "add_low_rank",
    "fetch_weights",
    "find_architecture",
    "find_weights",
    "train_only",
]
