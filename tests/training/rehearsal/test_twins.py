"""Random numbers drawn per token in a collation raise no alarm, and do not hide records that meet."""

import pytest
import torch
from tests.support.loops import Text, padded, private, train
from tests.support.random_collation import (
    ALONE,
    WITH_A_COUPLING,
    batch_of,
    loss_of_records,
    masked,
    sentences,
    shifted,
    texts,
    tokenized,
    word_dropout,
)

from spectral_dp import RehearsalError
from spectral_dp.training.rehearsal.twins import content, find_twins, resized, same_but_for_padding

pytestmark = pytest.mark.filterwarnings("ignore:no rule for")

SEEDS = range(2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("data", "collate_fn", "make", "loss", "options"), ALONE.values(), ids=ALONE)
def test_random_numbers_alone_are_no_coupling(data, collate_fn, make, loss, options, seed):
    engine, model, optimizer, loader = private(
        make, data=lambda: data(seed), collate_fn=collate_fn or padded, **options
    )
    assert 0 < train(model, optimizer, loader, loss) <= 40
    assert engine.accountant.ledger.steps == len(loader)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("data", "collate_fn", "make", "loss", "message"), WITH_A_COUPLING.values(), ids=WITH_A_COUPLING
)
def test_beside_a_coupling_they_do_not_hide_it(data, collate_fn, make, loss, message, seed):
    engine, model, optimizer, loader = private(make, data=lambda: data(seed), collate_fn=collate_fn)
    with pytest.raises(RehearsalError, match=message):
        train(model, optimizer, loader, loss)
    assert engine.accountant.ledger.steps == 0


def test_twins_of_which_chance_leaves_the_same_are_compared_again():
    """All texts begin with the same token, and the shortest of random truncations leave nothing else."""
    data = [(torch.cat([torch.tensor([1]), x]), 0) for x, _ in texts(0)]

    def truncated(records):
        return batch_of([x[: int(1 + torch.rand(()) ** 2 * len(x))] for x, _ in records], records)

    def train_on(make):
        _, model, optimizer, loader = private(make, data=lambda: data, collate_fn=truncated)
        return train(model, optimizer, loader, loss_of_records)

    assert train_on(masked) <= 40
    with pytest.raises(RehearsalError, match="number or length of the others"):
        train_on(lambda: Text(False))


OTHER_LENGTHS = [(torch.arange(2, 3 + n), n % 3) for n in range(40)]


def test_where_no_two_records_draw_alike_twins_are_made_up():
    """Few records, all of other lengths: random numbers alone are no coupling, and do not hide one."""

    def train_on(collate_fn):
        _, model, optimizer, loader = private(masked, data=lambda: OTHER_LENGTHS, collate_fn=collate_fn)
        return train(model, optimizer, loader, loss_of_records)

    def others_labels(records):
        x, y = word_dropout(records)
        return x, (y + y.sum()) % 3

    assert train_on(word_dropout) <= 45
    with pytest.raises(RehearsalError):
        train_on(others_labels)


def test_where_none_can_be_made_up_the_error_says_what_to_do():
    def by_content(records):  # draws for what the tokens are, not for how many there are
        for x, _ in records:
            torch.rand(int(x.sum()))
        return word_dropout(records)

    _, model, optimizer, loader = private(masked, data=lambda: OTHER_LENGTHS, collate_fn=by_content)
    with pytest.raises(RehearsalError, match=r"cannot be told .* __getitem__"):
        train(model, optimizer, loader, loss_of_records)


def test_a_made_up_record_has_the_content_of_one_and_the_length_of_another():
    long, short = torch.arange(7), torch.tensor([5, 6])
    record, like = ({"x": short, "text": "a b"}, [1, 2], 1), ({"x": long, "text": "c d e"}, [3], 2)
    made = resized(record, like)
    assert made[0]["x"].tolist() == [5, 6, 5, 6, 5, 6, 5]
    assert made[0]["text"] == "a b a"
    assert made[1:] == ([1], 1)


class TestTwins:
    def test_have_one_length_where_a_number_is_drawn_for_every_token(self):
        pairs = find_twins(texts(0), word_dropout, 8)
        assert len(pairs) > 60
        assert all(len(a) == len(b) and not torch.equal(a, b) for (a, _), (b, _) in pairs)

    def test_have_as_many_words_where_these_are_what_is_drawn_for(self):
        pairs = find_twins(sentences(0)[:60], tokenized, 8)
        assert len(pairs) >= 8
        assert all(len(a.split()) == len(b.split()) for (a, _), (b, _) in pairs)
        assert any(len(a) != len(b) for (a, _), (b, _) in pairs)

    def test_may_be_of_any_length_where_that_does_not_matter(self):
        data = [(torch.arange(2, 3 + n), n % 3) for n in range(40)]
        assert len(find_twins(data, shifted, 8)) == 20

    def test_are_not_the_same_record_twice(self):
        x = torch.arange(2, 9)
        assert not find_twins([(x, 1), (x.clone(), 1)], word_dropout, 1), "nor can different ones be made of them"
        assert len(find_twins([(x, 1), (x.clone(), 1), (x + 1, 1)], word_dropout, 1)) == 1

    def test_are_found_without_moving_a_generator(self):
        torch.manual_seed(4)
        state = torch.get_rng_state()
        find_twins(texts(0)[:10], word_dropout, 8)
        assert torch.equal(torch.get_rng_state(), state)


class TestSameButForPadding:
    A, B, LONG = (torch.arange(2, 5), 0), (torch.arange(3, 5), 1), (torch.arange(2, 20), 2)

    def compare(self, ours, theirs, collate_fn=lambda records: batch_of([x for x, _ in records], records)):
        sizes = len(ours), len(theirs)
        return same_but_for_padding(content(collate_fn(ours)), content(collate_fn(theirs)), sizes, 1)

    def test_beside_longer_and_more_records(self):
        assert self.compare([self.A, self.B], [self.A, self.LONG, self.B])
        assert not self.compare([self.A, self.B], [self.B, self.LONG, self.A])

    def test_padded_at_the_beginning(self):
        def from_the_left(records):
            return batch_of([x.flip(0) for x, _ in records], records)[0].flip(1)

        assert self.compare([self.A, self.B], [self.A, self.LONG], from_the_left)

    def test_labels_count(self):
        assert not self.compare([self.A, self.B], [(self.A[0], 2), self.LONG])

    def test_what_has_no_rows_cannot_be_told(self):
        assert not self.compare([self.A, self.B], [self.A, self.LONG], lambda r: torch.cat([x for x, _ in r]))
