"""A private run as a trainer sees it: as many batches as steps, and every piece of a step where nobody counts."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine
from spectral_dp.integrations.logical_steps import LogicalSteps, make_private


def run(*, rehearsal=True, engine=None, **options):
    model, engine = nn.Linear(3, 2), engine or PrivacyEngine()
    data = DataLoader(TensorDataset(torch.randn(40, 3), torch.randint(2, (40,))), batch_size=10)

    def train(batch):
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()

    rehearsed, ended = [], []

    def rehearse(batch):
        rehearsed.append(len(batch[0]))
        if rehearsed[-1]:
            train(batch)

    defaults = {"target_epsilon": None, "target_delta": 1e-3, "noise_multiplier": 1.0, "epochs": 1.0}
    optimizer, loader = make_private(
        engine,
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=data,
        max_grad_norm=1.0,
        max_physical_batch_size=3,
        rehearsal=rehearsal,
        **defaults | options,
    )
    return engine, LogicalSteps(optimizer, loader, rehearse, lambda: ended.append(True)), train, rehearsed, ended


def test_one_batch_for_each_logical_step():
    engine, steps, train, rehearsed, ended = run()
    pieces = 0
    for handed_out, batch in enumerate(steps, start=1):
        while True:
            pieces += 1
            assert len(batch[0]) == steps.current.size <= 3
            if steps.current.size:
                train(batch)
            if steps.current.is_last:
                break
            batch = steps.next_piece()
        steps.optimizer.step()
        assert engine.accountant.ledger.steps == handed_out
    assert handed_out == len(steps) == 4
    assert pieces > 4
    assert len(rehearsed) >= 4
    assert not ended


def test_negative_control_a_piece_that_is_left_out_is_an_error():
    _, steps, train, _, _ = run(rehearsal=False)
    batches = iter(steps)
    train(next(batches))  # and the trainer does not ask for the other pieces, nor step
    with pytest.raises(RuntimeError, match="was not stepped"):
        next(batches)


def test_the_end_of_the_budget_is_told():
    _, steps, train, _, ended = run(rehearsal=False, target_epsilon=2.0, noise_multiplier=None, epochs=0.5)
    count = 0
    for batch in steps:
        while not steps.current.is_last:
            train(batch)
            batch = steps.next_piece()
        if steps.current.size:
            train(batch)
        steps.optimizer.step()
        count += 1
    assert count == 2
    assert ended == [True]


def test_a_second_run_on_an_engine_has_the_noise_of_the_first():
    engine, steps, train, _, _ = run(rehearsal=False, target_epsilon=2.0, noise_multiplier=None)
    batch = next(iter(steps))
    while not steps.current.is_last:
        train(batch)
        batch = steps.next_piece()
    train(batch)
    steps.optimizer.step()
    _, again, *_ = run(rehearsal=False, engine=engine, target_epsilon=2.0, noise_multiplier=None)
    assert again.optimizer.noise_multiplier == steps.optimizer.noise_multiplier


def test_a_target_needs_an_end():
    with pytest.raises(ValueError, match="is not limited"):
        run(target_epsilon=2.0, noise_multiplier=None, epochs=None)
    with pytest.raises(ValueError, match="one of them"):
        run(target_epsilon=2.0)
