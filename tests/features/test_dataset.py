"""Features in the place of images: the same records in the same split."""

from dataclasses import replace

import pytest
import torch

from spectral_dp.data import ImageDataset
from spectral_dp.features import FeatureDataset, FeatureError, FeatureRows


def _both(train=40, test=10):
    images = (
        torch.arange(train, dtype=torch.uint8).view(-1, 1, 1, 1),
        torch.arange(test, dtype=torch.uint8).view(-1, 1, 1, 1),
    )
    labels = torch.arange(train), torch.arange(test)
    plain = ImageDataset("some", images[0], labels[0], images[1], labels[1], 10, (0.0,), (1.0,))
    rows = [FeatureRows(part.half()) for part in images]
    return plain, FeatureDataset("some", rows[0], labels[0], rows[1], labels[1], 10)


def test_validation_and_subsets_are_those_of_the_images():
    for change in (lambda d: d.with_validation(7), lambda d: d.subset(12, 3), lambda d: d.with_validation(9).subset(5)):
        images, features = map(change, _both())
        assert images.train_labels.tolist() == features.train_labels.tolist()
        assert images.test_labels.tolist() == features.test_labels.tolist()
        assert features.train_images[:].flatten().tolist() == features.train_labels.tolist()
        assert features.test_images[:].flatten().tolist() == features.test_labels.tolist()


def test_no_training_record_is_held_out():
    """Catches tuning on what is trained on."""
    features = _both()[1].with_validation(9)
    assert not set(features.train_labels.tolist()) & set(features.test_labels.tolist())


def test_records_for_a_loader_are_not_copied():
    features = _both()[1]
    for part in (features, features.with_validation(7)):
        records = part.training()
        assert len(records) == len(part.train_labels)
        assert all(int(x) == int(y) for x, y in (records[i] for i in range(len(records))))
    assert part.train_images.tensor is features.train_images.tensor
    assert features.normalise(features.test_images[:2]).dtype == torch.float32
    assert features.input_shape == (1, 1, 1)


class TestViews:
    @pytest.fixture
    def features(self):
        plain = torch.arange(40).half().view(-1, 1)
        rows = FeatureRows(plain, others=[plain + 100])
        return FeatureDataset("some", rows, torch.arange(40), FeatureRows(plain), torch.arange(40), 10)

    def test_records_for_a_loader_have_all_views(self, features):
        for part in (features, features.with_validation(7)):
            assert all(int(x) == int(z) - 100 == int(y) for x, z, y in part.training())
        assert part.test_images.shape == (7, 1)

    def test_all_of_them_lie_next_to_each_other(self, features):
        assert features.augmented(features.train_images[:2], 2).flatten().tolist() == [0, 100, 1, 101]

    def test_one_at_random(self, features):
        """Each with the same probability, and the same for a batch in parts."""
        views = features.train_images[:]
        whole = features.augmented(views, 1, torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(0)
        parts = [features.augmented(part, 1, generator) for part in views.split(7)]
        assert torch.equal(torch.cat(parts), whole)
        assert (whole.flatten() % 100).tolist() == list(range(40))
        assert 8 < int((whole >= 100).sum()) < 32

    def test_more_than_are_cached_are_refused(self, features):
        with pytest.raises(FeatureError, match="2 views of each record are cached"):
            features.augmented(features.train_images[:2], 3)

    def test_views_count_for_the_size_of_a_physical_batch(self, features):
        one = replace(features, train_images=features.train_images.first_view)
        assert one.physical_batch_size == 2 * features.physical_batch_size == 2**22


def test_a_physical_batch_of_large_features_stays_in_the_cache():
    wide = torch.zeros(3, 1).half().expand(3, 15552)
    rows, labels = FeatureRows(wide), torch.zeros(3)
    assert FeatureDataset("some", rows, labels, rows, labels, 10).physical_batch_size == 269
    wider = FeatureRows(wide.expand(3, 15552).repeat(1, 60))
    assert FeatureDataset("some", wider, labels, wider, labels, 10).physical_batch_size == 64
