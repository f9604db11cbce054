"""One map from signals to filtered coordinates and back, against explicit basis matrices."""

import pytest
import torch

from spectral_dp.mechanism import projection as projection_module
from spectral_dp.mechanism.filters import LowPassFilter, ShapedFilter
from spectral_dp.mechanism.projection import Projection
from spectral_dp.mechanism.transforms import get_transform

TRANSFORMS = ["fourier", "dct", "haar", "hadamard", "identity"]
FILTERS = {
    "low": LowPassFilter(0.5),
    "paper": LowPassFilter(0.5, order="clip_then_filter"),
    "shaped": ShapedFilter(torch.linspace(2, 0.1, 16).view(4, 4)),
}


@pytest.fixture(params=["matrix", "transform"])
def path(request, monkeypatch):
    """Both ways to the same coordinates."""
    for name in TRANSFORMS:
        limit = 10**6 if request.param == "matrix" else 0
        monkeypatch.setattr(type(get_transform(name)), "matmul_limit", limit)
    return request.param


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_coordinates_are_those_of_the_basis(name, filter, path):
    transform = get_transform(name)
    projection = Projection(transform, gains := filter.gains(transform, (4, 4)))
    signal = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    z = signal.flatten(2) @ transform.basis((4, 4)).T * gains.pre.flatten().double()
    counted = projection.analyse(signal, counted=True)
    torch.testing.assert_close(projection.analyse(signal), z[..., gains.kept.flatten()])
    torch.testing.assert_close(counted, z[..., gains.counted.flatten()])
    torch.testing.assert_close(projection.kept_of_counted(counted), projection.analyse(signal))
    assert counted.shape[-1] == projection.counted_size
    torch.testing.assert_close(signal.flatten(2) @ projection.matrix(signal, counted=True).T, counted)


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_way_back_has_the_post_gains(name, filter, path):
    transform = get_transform(name)
    projection = Projection(transform, gains := filter.gains(transform, (4, 4)))
    kept = torch.randn(3, gains.count, dtype=torch.float64)
    z = torch.zeros(3, 16, dtype=torch.float64)
    z[:, gains.kept.flatten()] = kept
    expected = (z * gains.post.flatten().double()) @ transform.basis((4, 4))
    torch.testing.assert_close(projection.synthesise(kept), expected.view(3, 4, 4))


def test_matrices_are_made_once_for_each_dtype():
    transform = get_transform("dct")
    projection = Projection(transform, LowPassFilter(0.5).gains(transform, 8))
    single, double = torch.zeros(1), torch.zeros(1).double()
    assert projection.matrix(single) is projection.matrix(single)
    assert projection.matrix(single).dtype == torch.float32
    assert projection.matrix(double).dtype == torch.float64


@pytest.mark.parametrize("length", [8, 4096])
def test_half_precision_is_refused_by_either_path(length):
    """Its rounding errors are larger than the clip's guard."""
    transform = get_transform("dct")
    projection = Projection(transform, LowPassFilter(0.5).gains(transform, length))
    with pytest.raises(TypeError, match="float32 or float64"):
        projection.analyse(torch.zeros(2, length, dtype=torch.bfloat16))


def test_the_way_back_of_a_large_tensor_goes_rows_by_rows(monkeypatch):
    gains = LowPassFilter(0.5).gains(get_transform("dct"), (16, 16), 0)
    projection, kept = Projection(get_transform("dct"), gains), torch.randn(7, 3, gains.count)
    monkeypatch.setattr(type(get_transform("dct")), "matmul_limit", 0)
    whole = projection.synthesise(kept)
    monkeypatch.setattr(projection_module, "_PIECE", 1000)
    by_rows = projection.synthesise(kept)
    assert by_rows.shape == whole.shape == (7, 3, 16, 16)
    torch.testing.assert_close(by_rows, whole, rtol=1e-6, atol=1e-6)
