"""Nothing is lost, and nothing is mixed: atomic files, refused damage, checkpoints that continue their own run only."""

import os
import pickle
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from tests.support.checkpoints import go_on, refused, save, trained
from tests.support.killable_runs import finished, killed, started, steps_with_checkpoints
from tests.support.private_runs import BATCH, N, cnn, setup, task

from spectral_dp import CheckpointError, PrivacyEngine, SpectralConfig
from spectral_dp.accounting import Ledger, epsilon
from spectral_dp.mechanism.filters import AdaptiveFilter
from spectral_dp.training import checkpoint


class TestFiles:
    def test_a_failed_write_leaves_the_old_file_whole(self, tmp_path, monkeypatch):
        path = tmp_path / "run.pt"
        checkpoint.save({"a": 1}, path)

        def full_disk(*args, **kwargs):
            args[1].write(b"half a file")
            raise OSError("no space left on device")

        monkeypatch.setattr(torch, "save", full_disk)
        with pytest.raises(OSError, match="no space"):
            checkpoint.save({"a": 2}, path)
        assert checkpoint.load(path)["a"] == 1
        assert [p.name for p in tmp_path.iterdir()] == ["run.pt"], "no litter"

    @pytest.mark.parametrize("keep", [0.0, 0.3, 0.9, 0.999])
    def test_truncated_files_are_refused(self, tmp_path, keep):
        path = tmp_path / "run.pt"
        checkpoint.save({"a": torch.randn(1000)}, path)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])
        with pytest.raises(CheckpointError, match="truncated"):
            checkpoint.load(path)

    def test_foreign_files_are_refused(self, tmp_path):
        torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
        with pytest.raises(CheckpointError, match="not a checkpoint of this library"):
            checkpoint.load(tmp_path / "other.pt")
        torch.save({"format": checkpoint.FORMAT, "version": 99}, tmp_path / "future.pt")
        with pytest.raises(CheckpointError, match="version 99"):
            checkpoint.load(tmp_path / "future.pt")
        torch.save({"format": checkpoint.FORMAT, "version": 1, "ledger": {}}, tmp_path / "before.pt")
        with pytest.raises(CheckpointError, match=r"version 1, this library reads 3.*start a new run"):
            checkpoint.load(tmp_path / "before.pt")

    def test_a_flipped_bit_is_refused(self, tmp_path):
        """torch.load does not notice one in a tensor; the last two lines are the control."""
        path = tmp_path / "run.pt"
        checkpoint.save({"a": torch.zeros(1000)}, path)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="do not match its seal"):
            checkpoint.load(path)
        assert torch.load(path, weights_only=True)["a"].any()

    def test_a_flip_anywhere_is_refused_or_means_nothing(self, tmp_path):
        """Torch's unpickler fails in ways of its own (IndexError, TypeError); padding of the file holds nothing."""
        path, state = tmp_path / "run.pt", {"a": torch.arange(4.0), "b": [1, 2.5, {"c": "d"}]}
        checkpoint.save(state, path)
        data = path.read_bytes()
        for place in range(0, len(data), 3):
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            with suppress(CheckpointError):
                assert checkpoint.seal(checkpoint.load(path)) == checkpoint.seal(state)

    def test_learning_rates_of_numpy_are_saved_as_numbers(self, tmp_path):
        """They come from np.logspace; without this, the first save of a long run would fail."""
        engine, model, _, _ = setup(lr=np.float64(0.25))
        save(tmp_path / "run.pt", engine, model, grid=[np.float32(0.5)])
        state = checkpoint.load(tmp_path / "run.pt")
        assert state["optimizer"]["param_groups"][0]["lr"] == 0.25
        assert state["extra"] == {"grid": [0.5]}

    def test_what_could_not_be_read_back_is_not_written(self, tmp_path):
        path = tmp_path / "run.pt"
        checkpoint.save({"a": 1}, path)
        for value, reason in [(object(), "got a object"), (torch.eye(2).to_sparse(), "dense tensors")]:
            with pytest.raises(CheckpointError, match=reason):
                checkpoint.save({"a": [value]}, path)
        assert checkpoint.load(path) == {"a": 1}

    def test_everything_torch_has_is_sealed_alike_before_and_after(self, tmp_path):
        """Catches a seal that depends on strides, device or container, and so refuses a sound file."""
        state = {
            "transposed": torch.arange(12).view(3, 4).t()[1:],
            "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
            "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(True),
            "expanded": torch.ones(1).expand(5),
            "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "model": cnn().state_dict(),
            "plain": [None, -0.0, float("nan"), b"bytes", (1, "two"), {3: torch.Size([4])}],
        }
        checkpoint.save(state, tmp_path / "run.pt")
        assert checkpoint.load(tmp_path / "run.pt").keys() == state.keys()
        assert checkpoint.load(tmp_path / "run.pt", mmap=True).keys() == state.keys()

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
            ({"a": 1}, {"a": 1.0}),
            ({"a": 1}, {"a": True}),
            ({"a": 0.0}, {"a": -0.0}),
            ({"a": "1"}, {"a": 1}),
            ({"a": [1, [2]]}, {"a": [[1], 2]}),
            ({"a": ["x", "y"]}, {"a": ["xy", ""]}),
            ({"a": torch.zeros(4)}, {"a": torch.zeros(2, 2)}),
            ({"a": torch.zeros(2)}, {"a": torch.zeros(1, dtype=torch.float64)}),
        ],
    )
    def test_different_contents_have_different_seals(self, one, other):
        assert checkpoint.seal(one) != checkpoint.seal(other)
        assert checkpoint.seal(one) == checkpoint.seal(dict(one))

    def test_nothing_in_a_file_is_executed(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return os.system, ("touch " + str(tmp_path / "pwned"),)

        with (tmp_path / "evil.pt").open("wb") as file:
            pickle.dump(Evil(), file)
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path / "evil.pt")
        assert not (tmp_path / "pwned").exists()

    def test_a_missing_directory_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no directory"):
            checkpoint.save({}, tmp_path / "nowhere" / "run.pt")
        with pytest.raises(FileNotFoundError):
            checkpoint.load(tmp_path / "none.pt")


def edit_noise(state, other):
    state["ledger"]["entries"][0][1] = 50.0


def edit_rate(state, other):
    state["ledger"]["entries"][0][2] = 1e-6


def swap(*parts):
    def change(state, other):
        for part in parts:
            state[part] = other[part]

    change.__name__ = "swap " + " ".join(parts)
    return change


EDITS = [
    edit_noise,
    edit_rate,
    swap("module"),
    swap("optimizer"),
    swap("ledger", "steps"),
    swap("filters"),
    swap("extra"),
]


class TestEdits:
    @pytest.fixture
    def states(self, tmp_path):
        """Two checkpoints of one run, with everything in which they differ, as torch reads and writes them."""
        config = SpectralConfig(conv_filter=AdaptiveFilter())
        model = cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        engine = PrivacyEngine()
        common = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "spectral": config}
        loader = torch.utils.data.DataLoader(task(), batch_size=BATCH)
        _, optimizer, loader = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **common)
        states = []
        for _ in range(2):
            go_on(model, optimizer, loader, 3)
            save(tmp_path / "run.pt", engine, model, step=optimizer.steps)
            states.append(torch.load(tmp_path / "run.pt", weights_only=True))
        return (*states, engine, model)

    @pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
    def test_an_edited_checkpoint_is_refused(self, tmp_path, states, edit):
        """Weights of step 6 beside the ledger of step 3 are released under the epsilon of step 3."""
        older, newer, engine, model = states
        torch.save(newer, tmp_path / "same.pt")
        engine.load_checkpoint(path=tmp_path / "same.pt", module=model)  # the control: written anew, but not edited
        edit(newer, older)
        torch.save(newer, tmp_path / "edited.pt")
        refused(engine, model, tmp_path / "edited.pt", "do not match its seal")

    @pytest.mark.parametrize("edit", EDITS[:2], ids=lambda edit: edit.__name__)
    def test_an_edited_ledger_under_a_new_seal_is_refused(self, tmp_path, edit):
        """The ledger's chain is a second lock: it also keeps ledgers that lie in other files."""
        engine, model, _, _ = trained()
        save(tmp_path / "run.pt", engine, model)
        state = checkpoint.load(tmp_path / "run.pt")
        edit(state, None)
        checkpoint.save(state, tmp_path / "run.pt")
        refused(*setup()[:2], tmp_path / "run.pt", "changed after it was written")

    def test_a_ledger_of_another_step_under_a_new_seal_is_refused(self, tmp_path):
        engine, model, optimizer, loader = trained(3)
        early = engine.accountant.ledger.state_dict()
        go_on(model, optimizer, loader, 3)
        save(tmp_path / "run.pt", engine, model)
        checkpoint.save(checkpoint.load(tmp_path / "run.pt") | {"ledger": early}, tmp_path / "run.pt")
        refused(*setup()[:2], tmp_path / "run.pt", "ledger lists 3 steps, but 6 were made")

    def test_whoever_controls_the_disk_can_lie(self, tmp_path):
        """The limit, as the documentation states it: seal and chain hold no secret."""
        engine, model, _, _ = trained()
        save(tmp_path / "run.pt", engine, model)
        state = checkpoint.load(tmp_path / "run.pt")
        lie = Ledger()
        lie.record(50.0, 1e-6, steps=6)
        checkpoint.save(state | {"ledger": lie.state_dict()}, tmp_path / "run.pt")
        new, fresh, _, _ = setup()
        new.load_checkpoint(path=tmp_path / "run.pt", module=fresh)
        assert new.get_epsilon(1e-3) < 0.01 * engine.get_epsilon(1e-3)

    def test_something_else_that_was_sealed_is_refused(self, tmp_path):
        checkpoint.save({"module": {}, "epoch": 3}, tmp_path / "run.pt")
        refused(*setup()[:2], tmp_path / "run.pt", "no filters, ledger, .*not saved by PrivacyEngine.save_checkpoint")


def test_a_run_killed_again_and_again_ends_with_the_same_epsilon(tmp_path):
    """A real process, killed without warning at odd moments, resumed from whatever its last checkpoint is."""
    path, steps = tmp_path / "run.pt", 40
    for kills, delay in enumerate((0.01, 0.07, 0.15)):
        process, connection = started(steps_with_checkpoints, path, steps)
        assert connection.recv() == "ready"
        deadline = time.monotonic() + 30
        while kills == 0 and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        killed(process, connection)
        assert "ledger" in checkpoint.load(path), "the file is whole at every moment"
    process, connection = started(steps_with_checkpoints, path, steps)
    assert connection.recv() == "ready"
    result = finished(process, connection)
    assert result["steps"] == steps
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"], "killed writers' files"
    assert result["epsilon"] == pytest.approx(epsilon(1.0, BATCH / N, steps, 1e-3), rel=1e-9)
