"""Records in the form in which they contribute."""

import pytest
import torch

from spectral_dp.heads import HeadError, random_projection
from spectral_dp.heads.records import check_records, record_parts, unit_rows


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


def test_the_number_of_features():
    assert check_records(torch.zeros(0, 3, 4), torch.zeros(0).long(), 2, 1.0) == 12
