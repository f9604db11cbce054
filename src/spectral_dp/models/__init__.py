"""The paper's networks, and a registry that the command line and user code share."""

from spectral_dp.models.networks import Activation, LeNet5, Model1, Model2, Model3
from spectral_dp.models.registry import Entry, build, entry, names, register_model

__all__ = ["Activation", "Entry", "LeNet5", "Model1", "Model2", "Model3", "build", "entry", "names", "register_model"]
