"""Every batch that the loader draws is stepped, or an error says so: what is skipped is missing in the ledger."""

import pytest
import torch
from tests.support.loops import cnn, images, mean_loss, private, train
from torch.utils.data import TensorDataset


def few():
    x, y = images().tensors
    return TensorDataset(x[:60], y[:60])


SMALL = {"data": few, "batch_size": 1}  # a third of the batches are empty


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    mean_loss(model, x, y).backward()
    optimizer.step()


def train_where(model, optimizer, loader, is_taken):
    for number, (x, y) in enumerate(loader):
        if is_taken(number, x):
            step(model, optimizer, x, y)


def test_a_loss_that_is_not_finite_must_not_skip_a_piece():
    """All the batch mates in the piece would go with it."""
    engine, model, optimizer, loader = private(cnn, max_physical_batch_size=8, rehearsal=False)
    with pytest.raises(RuntimeError, match=r"isfinite\(loss\): continue"):
        train_where(model, optimizer, loader, lambda number, _: number != 1)
    assert engine.accountant.ledger.steps == 0


def test_an_empty_batch_must_not_skip_the_step():
    engine, model, optimizer, loader = private(cnn, rehearsal=False, **SMALL)
    with pytest.raises(RuntimeError, match=r"len\(x\) == 0: continue"):
        train_where(model, optimizer, loader, lambda _, x: len(x) > 0)
    assert engine.accountant.ledger.steps < 60


def test_the_rehearsal_meets_the_empty_batch_first():
    """At the start, rather than after hours."""
    _, model, optimizer, loader = private(cnn, **SMALL)
    with pytest.raises(RuntimeError, match="was not stepped"):
        train_where(model, optimizer, loader, lambda _, x: len(x) > 0)
    assert optimizer.steps == 0


def test_an_empty_batch_may_be_stepped_without_a_backward_pass():
    engine, model, optimizer, loader = private(cnn, **SMALL)
    for x, y in loader:
        optimizer.zero_grad()
        if len(x):
            mean_loss(model, x, y).backward()
        optimizer.step()
    assert engine.accountant.ledger.steps == 60


def test_a_step_that_failed_and_was_caught_is_missed():
    _, model, optimizer, loader = private(cnn, rehearsal=False)

    def run():
        for x, y in loader:
            try:
                step(model, optimizer, x[:, :, 1:], y)
            except RuntimeError:
                continue

    with pytest.raises(RuntimeError, match="was not stepped"):
        run()


def test_the_last_batch_of_an_epoch_is_missed_too():
    _, model, optimizer, loader = private(cnn, rehearsal=False)
    with pytest.raises(RuntimeError, match="was not stepped"):
        train_where(model, optimizer, loader, lambda number, _: number < len(loader) - 1)


def test_reading_ahead_is_missed():
    _, _, _, loader = private(cnn, rehearsal=False)
    batches = iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match="one batch at a time"):
        next(batches)


def test_an_epoch_may_be_broken_off():
    engine, model, optimizer, loader = private(cnn, rehearsal=False)
    for number, (x, y) in enumerate(loader):
        if number == 3:
            break
        step(model, optimizer, x, y)
    train(model, optimizer, loader)
    assert engine.accountant.ledger.steps == 3 + len(loader)


def test_the_loader_can_be_read_without_gradients():
    engine, model, optimizer, loader = private(cnn, rehearsal=False)
    with torch.no_grad():
        assert len([x for x, _ in loader]) == len(loader)
    train(model, optimizer, loader)
    assert engine.accountant.ledger.steps == len(loader)


@pytest.mark.parametrize("skipped", [0, 2])
def test_but_not_half_trained_on(skipped):
    """A loop under no_grad that turns gradients on inside could skip what it likes."""
    _, model, optimizer, loader = private(cnn, rehearsal=False)

    @torch.no_grad()
    def run():
        for number, (x, y) in enumerate(loader):
            if number != skipped:
                with torch.enable_grad():
                    step(model, optimizer, x, y)

    with pytest.raises(RuntimeError, match="not stepped"):
        run()


def test_a_missing_piece_is_missed_at_the_release_too():
    """Whatever the loader says: the control is one that does not ask."""
    engine, model, optimizer, loader = private(cnn, max_physical_batch_size=8, rehearsal=False)
    loader.settle = lambda _: None
    with pytest.raises(RuntimeError, match="records are missing"):
        train_where(model, optimizer, loader, lambda number, _: number != 1)
    assert engine.accountant.ledger.steps == 0


def test_messages_do_not_tell_how_many_were_drawn():
    _, model, optimizer, loader = private(cnn, rehearsal=False)
    x, y = next(iter(loader))
    mean_loss(model, x[1:], y[1:]).backward()
    with pytest.raises(RuntimeError, match="fewer samples") as caught:
        optimizer.step()
    assert not any(character.isdigit() for character in str(caught.value))
