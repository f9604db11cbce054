"""Records in the form in which they contribute."""

import pytest
import torch

from spectral_dp.heads import HeadError, random_projection
from spectral_dp.heads.records import check_records, record_parts, unit_rows
from spectral_dp.mechanism.transforms import get_transform


def _orthogonal_records(n=2048, features=300, dimensions=64):
    """Records without a part that a random projection keeps."""
    p = random_projection(features, dimensions)
    rows = torch.randn(n, features, generator=torch.Generator().manual_seed(0)).double()
    for _ in range(3):
        rows = rows - (rows @ p) @ p.T
    return rows, p


def _blank_records(n=2048, features=256, dimensions=64):
    """Records of one number, all alike, and a public basis of cosines without the constant."""
    p = get_transform("dct").basis(features)[1 : dimensions + 1].T
    return torch.full((n, features), 0.7).half(), p


def test_rows_are_centred_projected_and_of_unit_length():
    rows, centre, p = torch.randn(6, 2, 5).half(), torch.randn(10), random_projection(10, 4)
    found = unit_rows(rows, centre, p)
    expected = (rows.flatten(1).double() - centre) @ p
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected / expected.norm(dim=1, keepdim=True))


def test_zeros_stay_zeros():
    assert not unit_rows(torch.zeros(2, 3)).any()


def test_parts_are_all_records_in_their_order_after_an_empty_one(monkeypatch):
    monkeypatch.setattr("spectral_dp.heads.records._ROWS_AT_ONCE", 4)
    rows, labels = torch.randn(10, 3), torch.arange(10)
    parts = list(record_parts(rows, labels))
    assert [len(x) for x, _ in parts] == [0, 4, 4, 2]
    assert torch.equal(torch.cat([x for x, _ in parts]), unit_rows(rows))
    assert torch.equal(torch.cat([y for _, y in parts]), labels)


def test_a_row_does_not_depend_on_its_mates():
    """Catches a product in low precision, in which the records of a data set could move together."""
    rows, p = torch.randn(501, 300), random_projection(300, 64)
    alone = torch.cat([unit_rows(row[None], None, p) for row in rows])
    assert (unit_rows(rows, None, p) - alone).norm() < 1e-11


@pytest.mark.parametrize("make", [_orthogonal_records, _blank_records], ids=["orthogonal", "blank"])
def test_a_row_that_the_projection_leaves_nothing_of_does_not_depend_on_its_mates(make):
    """Catches rounding errors that are scaled to unit length: one record more then turns many others."""
    rows, p = make()
    for n in (1, 5, 50, 2047):
        assert (unit_rows(rows[: n + 1], None, p)[:n] - unit_rows(rows[:n], None, p)).norm() < 1e-9


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e5])
def test_the_least_share_is_that_of_orthonormal_columns_whatever_their_scale(scale):
    p = torch.eye(5, 2).double()
    rows = torch.tensor([[0, 0, 1, 0, 0], [1e-4, 0, 1, 0, 0], [1e-2, 0, 1, 0, 0]]).double()
    assert torch.allclose(unit_rows(rows, None, scale * p).norm(dim=1), torch.tensor([0, 0.1, 1]).double())


@pytest.mark.parametrize("shape", [(2, 5), (10,), (1, 10)])
def test_a_centre_of_any_shape_has_the_numbers_of_a_record_in_their_order(shape):
    rows, centre = torch.randn(6, 2, 5), torch.randn(10)
    assert torch.equal(unit_rows(rows, centre.view(shape)), unit_rows(rows, centre))


@pytest.mark.parametrize(
    ("rows", "labels", "classes", "sigma", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(2).long(), 2, 1.0, "3 records and 2 labels"),
        (torch.zeros(2, 2), torch.tensor([0, 2]), 2, 1.0, "from 0 to 1, got 0 to 2"),
        (torch.zeros(2, 2), torch.tensor([0, -1]), 2, 1.0, "from 0 to 1"),
        (torch.zeros(2, 2), torch.zeros(2), 2, 1.0, "got torch.float32"),
        (torch.zeros(2, 2), torch.zeros(2, 1).long(), 2, 1.0, r"of shape \(2, 1\)"),
        (torch.zeros(2, 2), torch.zeros(2).long(), 1, 1.0, "at least two classes"),
        (torch.zeros(2, 2), torch.zeros(2).long(), 2, -1.0, "noise_multiplier must be at least 0"),
    ],
)
def test_what_no_head_can_be_made_of_is_refused(rows, labels, classes, sigma, message):
    with pytest.raises(HeadError, match=message):
        check_records(rows, labels, classes, sigma)


@pytest.mark.parametrize(
    "centre",
    [torch.zeros(1), torch.tensor(0.5), torch.zeros(3, 12), torch.full((12,), torch.nan)],
    ids=["one number", "no dimension", "several points", "not finite"],
)
def test_a_centre_that_is_no_point_among_the_features_is_refused(centre):
    """Catches one that fits a difference, and no product: the release was charged by then."""
    with pytest.raises(HeadError, match="for each of the 12 features"):
        check_records(torch.zeros(2, 3, 4), torch.zeros(2).long(), 2, 1.0, centre)


def test_records_without_features_are_refused():
    with pytest.raises(HeadError, match="at least one feature"):
        check_records(torch.zeros(2, 0), torch.zeros(2).long(), 2, 1.0)


def test_the_number_of_features():
    assert check_records(torch.zeros(0, 3, 4), torch.zeros(0).long(), 2, 1.0) == 12
