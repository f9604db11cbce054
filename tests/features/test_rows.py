"""Parts and views of cached features, without copies of what is not asked for."""

import pytest
import torch
from tests.support.extractors import Scaled

from spectral_dp.features import FeatureError, FeatureRows, extract_features
from spectral_dp.features.rows import ViewsOfRows


def test_parts_of_parts():
    rows = FeatureRows(torch.arange(20).view(10, 2)).take(torch.tensor([9, 3, 5])).take(torch.tensor([2, 0]))
    assert rows.shape == (2, 2)
    assert rows[torch.tensor([0, 1])].tolist() == [[10, 11], [18, 19]]
    assert [part.tolist() for part in rows.split(1)] == [[[10, 11]], [[18, 19]]]


def test_rows_of_several_views():
    plain, other = torch.arange(20).view(10, 2), -torch.arange(20).view(10, 2)
    rows = FeatureRows(plain, others=[other]).take(torch.tensor([9, 3]))
    assert rows.shape == (2, 2, 2)
    assert rows[torch.tensor([1])].tolist() == [[[6, 7], [-6, -7]]]
    assert rows.first_view[:].tolist() == [[18, 19], [6, 7]]
    with pytest.raises(FeatureError, match="same shape"):
        FeatureRows(plain, others=[other[:3]])


def test_views_lie_side_by_side(tmp_path):
    images = torch.arange(32, dtype=torch.uint8).view(2, 1, 4, 4)
    plain = extract_features(images, Scaled(), tmp_path, title="t")
    mirrored = extract_features(images, Scaled(), tmp_path, title="t", view="mirrored")
    views = ViewsOfRows(plain, mirrored)
    assert views.shape == (2, 2, 2, 4, 4)
    assert torch.equal(views[:][:, 1], views[:][:, 0].flip(-1))
    assert views.identity != ViewsOfRows(mirrored, plain).identity


def test_views_of_other_records_are_refused(tmp_path):
    caches = [extract_features(torch.zeros(n, 1, 4, 4).byte(), Scaled(), tmp_path, title="t") for n in (2, 3)]
    with pytest.raises(FeatureError, match="same shape"):
        ViewsOfRows(*caches)
    other = extract_features(torch.ones(2, 1, 4, 4).byte(), Scaled(), tmp_path, title="t")
    with pytest.raises(FeatureError, match="different records"):
        ViewsOfRows(caches[0], other)
