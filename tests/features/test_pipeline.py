"""Front end and stages together: what comes out is what one after the other gives."""

import pytest
import torch
from tests.support.extractors import Scaled

from spectral_dp.features import FeatureError, Prepared, extract_features
from spectral_dp.features.pipeline import extract_in_stages, shape_after
from spectral_dp.features.rows import ViewsOfRows

IMAGES = torch.arange(160, dtype=torch.uint8).view(10, 1, 4, 4)


def test_stages_follow_each_other(tmp_path):
    stages = [Prepared(groups=2), Prepared(ratio=0.5)]
    found = extract_in_stages(IMAGES, Scaled(), stages, tmp_path, title="t")
    one = extract_features(IMAGES, Scaled(), tmp_path / "by hand", title="t")
    two = extract_features(one, stages[0], tmp_path / "by hand", title="t")
    three = extract_features(two, stages[1], tmp_path / "by hand", title="t")
    assert torch.equal(found[:], three[:])
    assert found.shape == (10, *shape_after(Scaled(), stages, (1, 4, 4)))
    assert found.path.name.startswith("t-scaled-prepared-prepared-")


def test_views_are_averaged_by_the_first_stage(tmp_path):
    views = ("plain", "mirrored")
    found = extract_in_stages(IMAGES, Scaled(), [Prepared()], tmp_path, title="t", views=views)
    caches = [extract_features(IMAGES, Scaled(), tmp_path, title="t", view=view) for view in views]
    assert torch.equal(found[:].float(), ViewsOfRows(*caches)[:].float().mean(1).half().float())
    assert shape_after(Scaled(), [Prepared()], (1, 4, 4), views=2) == (2, 4, 4)


def test_views_without_a_stage_are_refused(tmp_path):
    """Catches a head that would read one view, although several were asked for."""
    with pytest.raises(FeatureError, match="averaged by a stage"):
        extract_in_stages(IMAGES, Scaled(), [], tmp_path, title="t", views=("plain", "mirrored"))


def test_without_stages_it_is_the_front_end(tmp_path):
    found = extract_in_stages(IMAGES, Scaled(), [], tmp_path, title="t")
    assert torch.equal(found[:], extract_features(IMAGES, Scaled(), tmp_path, title="t")[:])
