"""Saving and resuming a small private run."""

import pytest
import torch

from spectral_dp import CheckpointError
from tests.support.private_runs import setup, weights


def save(path, engine, model, **extra):
    engine.save_checkpoint(path=path, module=model, checkpoint_dict=extra)


def trained(steps=6, **options):
    """An engine that has made some steps, with its model."""
    engine, model, optimizer, loader = setup(**options)
    go_on(model, optimizer, loader, steps)
    return engine, model, optimizer, loader


def go_on(model, optimizer, loader, steps):
    last = optimizer.steps + steps
    while optimizer.steps < last:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if optimizer.steps == last:
                break


def refused(engine, model, path, reason, error=CheckpointError):
    """A refused checkpoint changes nothing."""
    before, spent = weights(model).clone(), engine.accountant.ledger.state_dict()
    with pytest.raises(error, match=reason):
        engine.load_checkpoint(path=path, module=model)
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert engine.accountant.ledger.state_dict() == spent
