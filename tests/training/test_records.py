"""Every record is in a data set once, or it is refused."""

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, random_split

from spectral_dp.training.records import copied
from spectral_dp.training.sampling import CountingLoader, PoissonLoader

REPEATING = {
    "a list": lambda d: Subset(d, [*range(40), 3]),
    "counted from the end": lambda d: Subset(d, [0, 39, -1]),
    "a tensor": lambda d: Subset(d, torch.tensor([1, 2, 1])),
    "a subset of a subset": lambda d: Subset(Subset(d, range(20)), [5, 6, 5]),
    "the same data twice": lambda d: ConcatDataset([d, d]),
    "overlapping subsets": lambda d: ConcatDataset([Subset(d, range(20)), Subset(d, range(19, 40))]),
}


@pytest.mark.parametrize("choose", REPEATING.values(), ids=REPEATING)
def test_records_that_are_there_several_times_are_refused(choose):
    """One person's record would count several times in a batch; the guarantee is for one."""
    data = TensorDataset(torch.arange(40.0))
    with pytest.raises(ValueError, match="more than once"):
        PoissonLoader(choose(data), batch_size=2)
    with pytest.raises(ValueError, match="more than once"):
        CountingLoader(DataLoader(choose(data), batch_size=2))


@pytest.mark.parametrize(
    "choose",
    [
        lambda d: ConcatDataset([Subset(d, range(20)), Subset(d, range(20, 40))]),
        lambda d: ConcatDataset([d, TensorDataset(torch.arange(40.0))]),
        lambda d: Subset(d, torch.randperm(40)),
        lambda d: random_split(d, [30, 10])[0],
    ],
    ids=["disjoint subsets", "two data sets", "a permutation", "random_split"],
)
def test_records_that_are_there_once_are_not(choose):
    PoissonLoader(choose(TensorDataset(torch.arange(40.0))), batch_size=2)


def test_copies_of_records_leave_the_rest_of_the_data_set_behind():
    """Catches copying all of a data set for each of its records: a row is a view of everything."""
    rows = torch.arange(1000.0).view(100, 10)
    record = {"x": rows[7], "y": [rows[8], 3]}
    copy = copied(record)
    assert torch.equal(copy["x"], rows[7])
    assert copy["y"][1] == 3
    assert copy["x"].untyped_storage().nbytes() == 40
    copy["x"].zero_()
    copy["y"].append(4)
    assert rows[7].sum() == 745
    assert len(record["y"]) == 2
