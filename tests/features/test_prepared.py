"""What a head reads: normalised by record, averaged over views, the lowest cosines."""

import pytest
import torch
from torch import nn

from spectral_dp.features import FeatureError, Prepared
from spectral_dp.mechanism.transforms import get_transform


def test_groups_are_normalised_for_each_record():
    maps = torch.randn(3, 6, 4, 4) * 5 + 2
    made = Prepared(groups=2).module((6, 4, 4))(maps)
    assert torch.allclose(made, nn.GroupNorm(2, 6, affine=False)(maps), atol=1e-5)
    assert torch.allclose(made[1], Prepared(groups=2).module((6, 4, 4))(maps[1:2])[0], atol=1e-6)


def test_kept_cosines_are_the_lowest():
    maps = torch.randn(2, 3, 4, 4, dtype=torch.float64).float()
    prepared = Prepared(ratio=0.75)
    made, whole = prepared.module((3, 4, 4))(maps), get_transform("dct").forward(maps, (-2, -1))
    assert made.shape == (2, 3, 4)
    assert torch.allclose(made[..., 0], whole[..., 0, 0], atol=1e-5)
    assert (made.norm() <= maps.norm() * (1 + 1e-6)).item()


def test_the_head_on_kept_cosines_is_the_filtered_layer():
    """One step of DP-SGD on the kept coefficients moves the outputs as one of the filtered layer does."""
    from spectral_dp.gradients.rules.layer_config import LayerConfig
    from spectral_dp.gradients.rules.linear import LinearRule
    from spectral_dp.mechanism.filters import LowPassFilter

    maps, dA = torch.randn(5, 3, 4, 4).double(), torch.randn(5, 2).double()
    layer = nn.Linear(48, 2, bias=False).double()
    rule = LinearRule(layer, LayerConfig(LowPassFilter(0.5), input_layout=(3, 4, 4)))
    kept = maps.float().flatten(2).double() @ Prepared(ratio=0.5).module((3, 4, 4)).cosines.double().T
    plain = LinearRule(nn.Linear(kept[0].numel(), 2, bias=False).double(), LayerConfig())
    ours, theirs = plain.squared_norms(kept.flatten(1), dA), rule.squared_norms(maps.flatten(1), dA)
    assert torch.allclose(ours, theirs, rtol=1e-4)
    c = torch.rand(5).double()
    sums = (plain.clipped_sum(kept.flatten(1), dA, c)["weight"], rule.clipped_sum(maps.flatten(1), dA, c)["weight"])
    assert torch.allclose(sums[0], sums[1].flatten(1), atol=1e-5)


def test_vectors_are_prepared_likewise():
    vectors = torch.randn(3, 2, 12)
    made = Prepared(groups=4).module((2, 12))(vectors)
    assert made.shape == (3, *Prepared(groups=4).output_shape((2, 12))) == (3, 12)
    assert torch.allclose(made, torch.nn.functional.group_norm(vectors.mean(1), 4))
    assert torch.equal(Prepared().module((12,))(vectors[:, 0]), vectors[:, 0])


def test_features_are_compressed_before_they_are_normalised():
    maps = torch.randn(3, 6, 4, 4)
    roots = maps.sign() * maps.abs().sqrt()
    made = Prepared(groups=2, exponent=0.5).module((6, 4, 4))(maps)
    assert torch.allclose(made, nn.GroupNorm(2, 6, affine=False)(roots), atol=1e-5)
    assert torch.equal(Prepared(exponent=0.5).module((6, 4, 4))(torch.zeros(1, 6, 4, 4)), torch.zeros(1, 6, 4, 4))


def test_an_exponent_of_one_is_another_name_for_the_caches_that_were_made_without_it():
    assert Prepared(groups=2).settings == {"groups": 2, "ratio": 0.0, "unit": False, "version": 1}
    assert Prepared(groups=2, exponent=0.5).settings["exponent"] == 0.5


def test_views_are_averaged():
    views = torch.randn(2, 2, 3, 4, 4)
    assert torch.allclose(Prepared().module((2, 3, 4, 4))(views), views.mean(1))


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"groups": 4}, (6, 4, 4), "no multiple of 4 groups: choose one of 1, 2, 3, 6"),
        ({}, (2, 2, 6, 4, 4), "expected maps"),
        ({"ratio": 0.5}, (6,), "no frequencies to drop"),
        ({"groups": 6}, (6, 1, 1), "one number each"),  # torch accepts it or not by the number of records
    ],
)
def test_maps_that_do_not_fit_are_refused(options, shape, message):
    with pytest.raises(FeatureError, match=message):
        Prepared(**options).output_shape(shape)


@pytest.mark.parametrize(
    "options", [{"groups": -1}, {"ratio": 1.0}, {"ratio": -0.1}, {"exponent": 0.0}, {"exponent": 2.0}]
)
def test_settings_that_do_not_work_are_refused(options):
    with pytest.raises(FeatureError):
        Prepared(**options)
