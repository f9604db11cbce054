"""What a failed rehearsal says: the place, and the change that helps there."""

import pytest

from spectral_dp.training.rehearsal.explanation import cannot_tell, depends_on_mates, depends_on_size, wrong_reduction
from spectral_dp.training.rehearsal.trace import Meeting

AT_INPUT = Meeting("head", "Linear", at_input=True, is_first=False)
AT_OUTPUT = Meeting("norm", "Centre", at_input=False, is_first=False)
FEED = Meeting("", "Sequential", at_input=True, is_first=True)


@pytest.mark.parametrize(
    ("met", "views", "said"),
    [
        (None, 1, "it is the loss"),
        (AT_INPUT, 1, r"reaches head \(Linear\) changed.*just before it"),
        (AT_OUTPUT, 1, r"norm \(Centre\) gives a record another output.*GroupNorm"),
        (Meeting("", "Net", at_input=False, is_first=False), 1, r"the model itself \(Net\) gives"),
        (FEED, 1, "feeds into the model.*collate_fn"),
        (FEED, 4, r"feeds into the model.*4 views.*repeat_interleave\(4, 0\)"),
    ],
)
@pytest.mark.parametrize("explain", [depends_on_mates, depends_on_size])
def test_the_place_and_the_remedy_are_named(explain, met, views, said):
    with pytest.raises(ValueError, match=said) as error:
        raise ValueError(explain(met, views))
    assert "rehearsal=False" in str(error.value)


@pytest.mark.parametrize(("announced", "other"), [("mean", "sum"), ("sum", "mean")])
def test_a_wrong_reduction_names_both_remedies(announced, other):
    said = wrong_reduction(announced)
    assert f"the loss is a {other}" in said
    assert f"loss_reduction='{other}' to make_private, or reduction='{announced}' to the loss" in said


def test_what_cannot_be_told_is_not_called_a_coupling():
    assert "cannot be told" in cannot_tell()
    assert "rehearsal=False" in cannot_tell()
