"""The methods of the engine that save and restore its run; ``test_run.py`` has what a restored run guarantees."""

import copy
import io

import pytest
import torch
from tests.support.private_runs import setup, train, weights

from spectral_dp import CheckpointError, PrivacyEngine


def test_without_a_run_there_is_nothing_to_save(tmp_path):
    with pytest.raises(RuntimeError, match="nothing is private yet"):
        PrivacyEngine().save_checkpoint(path=tmp_path / "x.pt", module=torch.nn.Linear(1, 1))


def test_what_is_kept_beside_it_comes_back(tmp_path):
    engine, model, optimizer, loader = setup()
    train(model, optimizer, loader)
    engine.save_checkpoint(path=tmp_path / "x.pt", module=model, checkpoint_dict={"epoch": 3})
    other, copied, *_ = setup()
    assert other.load_checkpoint(path=tmp_path / "x.pt", module=copied) == {"epoch": 3}
    assert torch.equal(weights(copied), weights(model))


class TestState:
    """The state of an engine as a value, for checkpoints that others write."""

    def test_a_run_goes_on_from_its_state(self):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        state = _written(engine.state_dict(module=model))
        other, copied, *rest = setup()
        other.load_state_dict(state, module=copied)
        assert other.accountant.ledger.continues(engine.accountant.ledger)
        train(model, optimizer, loader)
        train(copied, *rest)
        torch.testing.assert_close(weights(copied), weights(model), rtol=0, atol=0)
        assert other.get_epsilon(1e-3) == engine.get_epsilon(1e-3)

    def test_a_state_that_was_changed_is_refused(self):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        state = _written(engine.state_dict(module=model))
        for change in ({"steps": 1}, {"ledger": {}}, {"format": "another"}, {"version": 99}):
            other, copied, *_ = setup()
            before = weights(copied)
            with pytest.raises(CheckpointError):
                other.load_state_dict(copy.deepcopy(state) | change, module=copied)
            assert torch.equal(weights(copied), before)


def _written(state):
    """As another program's checkpoint would hold it, and give it back."""
    file = io.BytesIO()
    torch.save({"theirs": 1, "ours": state}, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)["ours"]
