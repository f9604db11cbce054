"""The paper's networks, on images (``networks``) and on scattering features (``scattering``), by name (``registry``).

The command line and user code share the registry: ``register_model`` adds a network, and ``build`` makes one, in its
dense or in its block-circulant form.
"""

from spectral_dp.models.networks import Activation, LeNet5, Model1, Model2, Model3
from spectral_dp.models.registry import Entry, build, entry, register_model
from spectral_dp.models.scattering import ScatterCNN, ScatteringNetwork, ScatterLinear

__all__ = [
    "Activation",
    "Entry",
    "LeNet5",
    "Model1",
    "Model2",
    "Model3",
    "ScatterCNN",
    "ScatterLinear",
    "ScatteringNetwork",
    "build",
    "entry",
    "register_model",
]
