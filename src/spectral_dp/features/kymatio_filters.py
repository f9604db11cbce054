"""The wavelets of a scattering transform, designed by kymatio: the only place that imports it.

``kymatio.torch``, the documented way in, also imports the scattering of volumes, which asks ``scipy.special`` for a
function (``sph_harm``) that SciPy 1.17 removed. The module of images alone imports beside every SciPy.
"""

from __future__ import annotations

from typing import Any

from spectral_dp.features.errors import FeatureError


def kymatio_transform(scales: int, angles: int, order: int, size: tuple[int, int]) -> Any:
    """Returns kymatio's own transform, a ``ScatteringTorch2D``, with its filters and its padding.

    Raises:
        FeatureError: If kymatio is not installed.
    """
    try:
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    except ImportError as error:
        raise FeatureError(
            f"scattering needs kymatio ({error}): install it with pip install 'spectral-dp[scattering]'"
        ) from error
    return ScatteringTorch2D(J=scales, shape=size, L=angles, max_order=order)
