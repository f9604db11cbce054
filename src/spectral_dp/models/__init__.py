"""The paper's networks on images (``networks``), heads on features (``scattering``, ``transfer``), ``registry``.

The command line and user code share the registry: ``register_model`` adds a network, and ``build`` makes one, in its
dense or in its block-circulant form.
"""

from spectral_dp.models.networks import Activation, LeNet5, Model1, Model2, Model3
from spectral_dp.models.registry import Entry, build, entry, register_model, spectral_of_head
from spectral_dp.models.scattering import FeatureNetwork, ScatterCNN, ScatterLinear
from spectral_dp.models.transfer import TransferHead

__all__ = [
    "Activation",
    "Entry",
    "FeatureNetwork",
    "LeNet5",
    "Model1",
    "Model2",
    "Model3",
    "ScatterCNN",
    "ScatterLinear",
    "TransferHead",
    "build",
    "entry",
    "register_model",
    "spectral_of_head",
]
