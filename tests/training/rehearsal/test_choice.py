"""Which records a rehearsal hands out: different ones, of different lengths, and others for each test."""

import pytest

from spectral_dp.training.rehearsal.choice import Choice

LARGE, SMALL = 4, 2
NEEDED = 2 * LARGE + SMALL


def choice(records, *, are_alike=False, collate=list):
    return Choice(
        len(records),
        lambda numbers: [records[number] for number in numbers],
        collate,
        are_alike=are_alike,
        large=LARGE,
        small=SMALL,
    )


def texts(count=1000):
    """Records of all lengths, of which no two are the same."""
    return [f"{number}:" + "x" * (number * 37 % 101) for number in range(count)]


class TestRecordsOfOneShape:
    def test_are_as_many_as_are_needed_and_no_two_the_same(self):
        """A record and itself would pass every test."""
        for test in range(7):
            records = choice(list(range(1000)), are_alike=True).records(test)
            assert len(records) == len(set(records)) == NEEDED

    def test_are_others_for_each_test(self):
        """Catches a coupling that shows on some records only, looked for on the same ones every time."""
        chosen = choice(list(range(1000)), are_alike=True)
        assert len({record for test in range(7) for record in chosen.records(test)}) == 7 * NEEDED

    def test_of_a_small_dataset_are_within_it(self):
        assert set(choice([0, 1, 2], are_alike=True).records(6)) <= {0, 1, 2}


class TestRecordsOfManyLengths:
    def test_a_short_one_comes_first_and_the_longest_second(self):
        """Padding shows in the short one, beside the longest."""
        first, longest, *rest = choice(texts()).records(0)
        assert len(first) < len(longest) == max(map(len, [longest, *rest]))
        assert len(first) == min(map(len, [first, *rest]))
        assert len(rest) == NEEDED - 1

    def test_are_others_for_each_test(self):
        chosen = choice(texts())
        assert len({chosen.records(test)[0] for test in range(7)}) == 7


class TestTwins:
    @pytest.fixture
    def chosen(self):
        return choice([(("a" * (number % 5 + 1)), number) for number in range(200)])

    def test_take_turns_in_the_batch(self, chosen):
        a, longest, b, *mates = chosen.with_twins(0)
        assert len(mates) == 2 * (LARGE - 2), "one place is for a or b, one for the longest"
        assert len({record[1] for record in (a, longest, b, *mates)}) == 3 + len(mates), "no record twice"

    def test_have_few_mates_in_the_small_batch_and_longer_ones_in_the_large(self, chosen):
        one, other, few, many = chosen.twins_and_mates(0)
        assert one != other
        assert (len(few), len(many)) == (SMALL - 1, LARGE - 1)
        assert max(len(record[0]) for record in few) <= min(len(record[0]) for record in many)

    def test_are_others_for_each_test(self, chosen):
        assert len({str(chosen.with_twins(test)[0]) for test in range(4)}) > 1

    def test_cannot_be_had_of_a_single_record(self):
        assert choice([("a", 0)]).with_twins(0) is None
        assert choice([("a", 0)]).twins_and_mates(0) is None
