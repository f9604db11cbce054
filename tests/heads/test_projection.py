"""Public projections."""

import pytest
import torch

from spectral_dp.heads import HeadError, random_projection


def test_columns_are_orthonormal():
    p = random_projection(20, 7)
    assert p.shape == (20, 7)
    assert torch.allclose(p.T @ p, torch.eye(7).double(), atol=1e-12)


def test_it_is_always_the_same_and_another_with_another_seed():
    assert torch.equal(random_projection(20, 7), random_projection(20, 7))
    assert not torch.allclose(random_projection(20, 7), random_projection(20, 7, seed=1))


@pytest.mark.parametrize("features", [3, 7])
def test_few_features_need_none(features):
    assert random_projection(features, 7) is None


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0)])
def test_nothing_cannot_be_projected(sizes):
    with pytest.raises(HeadError, match="at least one"):
        random_projection(*sizes)
