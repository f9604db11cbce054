"""Features in the place of images: the same records in the same split."""

import torch

from spectral_dp.data import ImageDataset
from spectral_dp.features import FeatureDataset, FeatureRows


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
