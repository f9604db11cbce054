"""The paper's networks on images (``networks``), heads on features (``scattering``, ``transfer``), ``registry``.

The command line and user code share the registry: ``register_model`` adds a network, and ``build`` makes one, in its
dense or in its block-circulant form.
"""

from spectral_dp.models.networks import LeNet5 as LeNet5
from spectral_dp.models.networks import Model1 as Model1
from spectral_dp.models.networks import Model2 as Model2
from spectral_dp.models.networks import Model3 as Model3
from spectral_dp.models.registry import build as build
from spectral_dp.models.registry import entry as entry
from spectral_dp.models.registry import register_model as register_model
from spectral_dp.models.registry import spectral_of_head as spectral_of_head
from spectral_dp.models.scattering import FeatureNetwork as FeatureNetwork
from spectral_dp.models.scattering import ScatterCNN as ScatterCNN
from spectral_dp.models.scattering import ScatterLinear as ScatterLinear
from spectral_dp.models.standardized_conv import StandardizedConv2d as StandardizedConv2d
from spectral_dp.models.transfer import TransferHead as TransferHead
