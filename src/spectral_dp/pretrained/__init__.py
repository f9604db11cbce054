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

from spectral_dp.pretrained.architectures import ARCHITECTURES as ARCHITECTURES
from spectral_dp.pretrained.architectures import NAMES as NAMES
from spectral_dp.pretrained.architectures import Architecture as Architecture
from spectral_dp.pretrained.architectures import find_architecture as find_architecture
from spectral_dp.pretrained.errors import WeightsError as WeightsError
from spectral_dp.pretrained.fine_tuning import train_only as train_only
from spectral_dp.pretrained.low_rank import add_low_rank as add_low_rank
from spectral_dp.pretrained.store import fetch_weights as fetch_weights
from spectral_dp.pretrained.weights import PretrainedWeights as PretrainedWeights
from spectral_dp.pretrained.weights import find_weights as find_weights
from spectral_dp.pretrained.wordpiece import WordPiece as WordPiece
