"""The state of an engine as a value, and budgets that are counted in steps."""

import copy
import io

import pytest
import torch
from tests.support.private_runs import BATCH, N, cnn, setup, task, train, weights
from torch.utils.data import DataLoader

from spectral_dp import CheckpointError, PrivacyEngine


def written(state):
    """As another program's checkpoint would hold it, and give it back."""
    file = io.BytesIO()
    torch.save({"theirs": 1, "ours": state}, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)["ours"]


def test_a_run_goes_on_from_its_state():
    engine, model, optimizer, loader = setup()
    train(model, optimizer, loader)
    state = written(engine.state_dict(module=model))
    other, copied, *rest = setup()
    other.load_state_dict(state, module=copied)
    assert other.accountant.ledger.continues(engine.accountant.ledger)
    train(model, optimizer, loader)
    train(copied, *rest)
    torch.testing.assert_close(weights(copied), weights(model), rtol=0, atol=0)
    assert other.get_epsilon(1e-3) == engine.get_epsilon(1e-3)


def test_a_state_that_was_changed_is_refused():
    engine, model, optimizer, loader = setup()
    train(model, optimizer, loader)
    state = written(engine.state_dict(module=model))
    for change in ({"steps": 1}, {"ledger": {}}, {"format": "another"}, {"version": 99}):
        other, copied, *_ = setup()
        before = weights(copied)
        with pytest.raises(CheckpointError):
            other.load_state_dict(copy.deepcopy(state) | change, module=copied)
        assert torch.equal(weights(copied), before)


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 3), (7 / (N / BATCH), 7), (2, 12), (0.4, 3)])
def test_part_of_an_epoch_counts_by_its_steps(epochs, steps):
    engine, model = PrivacyEngine(), cnn()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(task(), batch_size=BATCH),
        target_epsilon=2.0,
        target_delta=1e-3,
        epochs=epochs,
        max_grad_norm=1.0,
    )
    assert engine._run.books.budget.planned.steps == steps
