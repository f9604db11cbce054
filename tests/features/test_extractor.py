"""The protocol of a front end is what those of the package have."""

import pytest
import torch
from tests.support.extractors import Scaled

from spectral_dp.features import Prepared, Scattering


@pytest.mark.parametrize(
    ("extractor", "shape"),
    [(Scaled(), (1, 4, 4)), (Prepared(2, 0.5), (4, 4, 4)), (Scattering((0.5,), (0.5,)), (1, 8, 8))],
)
def test_front_ends_have_a_name_settings_a_shape_and_a_module(extractor, shape):
    if isinstance(extractor, Scattering):
        pytest.importorskip("kymatio")
    assert extractor.name
    assert isinstance(dict(extractor.settings), dict)
    made = extractor.module(shape)(torch.randint(0, 256, (3, *shape), dtype=torch.uint8))
    assert tuple(made.shape) == (3, *extractor.output_shape(shape))
