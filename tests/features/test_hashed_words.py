"""Hashed words: a fixed function of one text."""

import pytest
import torch

from spectral_dp.data.texts import encoded_texts
from spectral_dp.features import FeatureError, HashedWords


def features(*texts, width=None, **options):
    rows = torch.from_numpy(encoded_texts(texts, width))
    return HashedWords(**options).module((rows.shape[1],))(rows)


def test_vectors_have_unit_length_and_no_words_are_zeros():
    found = features("a good film", "", "?!")
    assert found.shape == (3, 2048)
    assert torch.allclose(found.norm(dim=1), torch.tensor([1.0, 0.0, 0.0]))


def test_texts_with_the_same_words_are_closer():
    one, near, far = features("what a good film", "a very good film", "den Rest des Tages schlief er")
    assert one @ near > 0.3 > one @ far


def test_pairs_know_the_order_and_single_words_do_not():
    one, two = features("not bad but good", "not good but bad", words=1)
    assert torch.allclose(one, two)
    one, two = features("not bad but good", "not good but bad", words=2)
    assert not torch.allclose(one, two)


def test_case_and_padding_do_not_matter():
    """A record's features must not depend on how long the others are."""
    assert torch.equal(features("A Good film"), features("a good film", width=500))


def test_they_are_the_same_for_all_time():
    """Catches a hash that differs between processes or versions: caches would be of something else."""
    (found,) = features("private words", dimensions=16)
    assert found.nonzero().flatten().tolist() == EXPECTED
    assert torch.allclose(found[found != 0].abs(), torch.full((3,), 3**-0.5))


EXPECTED = [3, 6, 8]


def test_images_are_refused():
    with pytest.raises(FeatureError, match="features of texts"):
        HashedWords().output_shape((3, 8, 8))


@pytest.mark.parametrize("options", [{"dimensions": 0}, {"words": 0}])
def test_nothing_is_refused(options):
    with pytest.raises(FeatureError, match="at least 1"):
        HashedWords(**options)
