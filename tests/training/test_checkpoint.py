"""Nothing is lost, and nothing is mixed: atomic files, refused damage, checkpoints that continue their own run only."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.private_runs import BATCH, N, cnn, setup, task, train, weights

from spectral_dp import CheckpointError, PrivacyEngine, SpectralConfig
from spectral_dp.accounting import Ledger, epsilon
from spectral_dp.mechanism.filters import AdaptiveFilter, Filter
from spectral_dp.mechanism.gains import Gains
from spectral_dp.training import checkpoint


def save(path, engine, model, **extra):
    engine.save_checkpoint(path=path, module=model, checkpoint_dict=extra)


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


class TestResuming:
    def test_goes_on_as_if_never_interrupted(self, tmp_path):
        """With seeded noise and batches, to the last digit: model, optimizer, ledger, sampler, noise."""
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader, epochs=3)

        first, other, opt, load = setup()
        train(other, opt, load)
        save(tmp_path / "run.pt", first, other, note="halfway")
        second, resumed, opt, load = setup()
        extra = second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        train(resumed, opt, load, epochs=2)
        assert extra == {"note": "halfway"}
        torch.testing.assert_close(weights(resumed), weights(model), rtol=0, atol=0)
        assert second.accountant.ledger.phases == engine.accountant.ledger.phases
        assert second.accountant.ledger.continues(first.accountant.ledger)
        assert second.get_epsilon(1e-3) == engine.get_epsilon(1e-3)

    def test_in_the_middle_of_an_epoch_and_of_a_logical_step(self, tmp_path):
        """What was summed of an incomplete step is not saved (it has no noise yet); the step is drawn again."""
        engine, model, optimizer, loader = setup(max_physical_batch_size=8)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if optimizer.steps == 3 and not loader.current.is_last:
                break
        save(tmp_path / "run.pt", engine, model)
        second, resumed, opt, load = setup(max_physical_batch_size=8)
        second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        train(resumed, opt, load)
        assert second.accountant.ledger.steps == 6

    def test_the_second_run_of_an_engine(self, tmp_path):
        """Its ledger holds the first run too."""

        def second_run(engine, model):
            return engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=torch.utils.data.DataLoader(task(), batch_size=80),
                noise_multiplier=1.5,
                max_grad_norm=1.0,
            )

        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        optimizer.zero_grad()
        train(*second_run(engine, model))
        save(tmp_path / "run.pt", engine, model)
        resumed = PrivacyEngine(seed=7, reproducibility_over_privacy=True)
        other, _, _ = second_run(resumed, cnn())
        resumed.load_checkpoint(path=tmp_path / "run.pt", module=other)
        assert resumed.accountant.ledger == engine.accountant.ledger
        assert resumed.accountant.ledger.steps == 9

    def test_filters_keep_what_they_learnt(self, tmp_path):
        config = SpectralConfig(conv_filter=AdaptiveFilter())
        engine, model, optimizer, loader = setup(spectral=config)
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        second, resumed, opt, _ = setup(spectral=config)
        second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        assert opt.gradients.filter_state() == optimizer.gradients.filter_state() != {}

    def test_a_secret_run_saves_no_secrets(self, tmp_path):
        model = cnn()
        engine = PrivacyEngine()
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(task(), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        save(tmp_path / "run.pt", engine, model)
        state = checkpoint.load(tmp_path / "run.pt")
        assert state["noise"] == {}
        assert set(state["sampler"]) == {"epoch", "step", "size", "batch_size", "seed"}
        assert state["sampler"]["seed"] is None

    @pytest.mark.parametrize(
        "other",
        [{"noise_multiplier": 2.0}, {"max_grad_norm": 0.5}, {"spectral": SpectralConfig(conv_ratio=0.5)}],
        ids=str,
    )
    def test_another_configuration_is_refused_and_changes_nothing(self, tmp_path, other):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        second, resumed, _, _ = setup(**other)
        before = weights(resumed).clone()
        with pytest.raises(CheckpointError, match="other settings"):
            second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        torch.testing.assert_close(weights(resumed), before)
        assert second.accountant.ledger.steps == 0

    def test_going_back_in_the_same_engine_is_refused(self, tmp_path):
        """Choosing the best of several checkpoints uses all the steps: the ledger must not forget the later ones."""
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        train(model, optimizer, loader)
        with pytest.raises(CheckpointError, match=r"12 steps and the saved one, of the same run, lists 6 only"):
            engine.load_checkpoint(path=tmp_path / "run.pt", module=model)
        assert engine.accountant.ledger.steps == 12

    def test_another_architecture_is_refused_and_changes_nothing(self, tmp_path):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        other = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))
        second, other, _, _ = setup(other)
        before = weights(other).clone()
        with pytest.raises(CheckpointError, match=r"3\.weight"):
            second.load_checkpoint(path=tmp_path / "run.pt", module=other)
        torch.testing.assert_close(weights(other), before)

    def test_a_failure_half_way_through_loading_changes_nothing(self, tmp_path):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        state = checkpoint.load(tmp_path / "run.pt")
        state["sampler"]["step"] = 99  # read last, after model and optimizer have been restored
        checkpoint.save(state, tmp_path / "run.pt")
        second, resumed, opt, _ = setup()
        before = weights(resumed).clone()
        with pytest.raises(ValueError, match="position"):
            second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        torch.testing.assert_close(weights(resumed), before)
        assert (second.accountant.ledger.steps, opt.steps) == (0, 0)

    def test_filters_of_ones_own_resume(self, tmp_path):
        class EveryOther(Filter):
            def gains(self, transform, shape, step=0):
                kept = torch.zeros(shape, dtype=torch.bool)
                kept.view(-1)[::2] = True
                return Gains(pre=kept, post=kept)

        engine, model, optimizer, loader = setup(spectral=SpectralConfig(conv_filter=EveryOther()))
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        second, resumed, _, _ = setup(spectral=SpectralConfig(conv_filter=EveryOther()))
        second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        torch.testing.assert_close(weights(resumed), weights(model))


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


class TestACheckpointContinuesItsOwnRunOnly:
    def test_another_run_with_as_many_steps_is_refused(self, tmp_path):
        """Reproduced before: the ledger said 10 steps after 20 releases."""
        engine, model, _, _ = trained(10)
        save(tmp_path / "own.pt", engine, model)
        other, its_model, _, _ = trained(10)
        save(tmp_path / "other.pt", other, its_model)
        refused(engine, model, tmp_path / "other.pt", "lists 10 of another run")
        engine.load_checkpoint(path=tmp_path / "own.pt", module=model)  # the controls: its own checkpoint,
        new, fresh, _, _ = setup()
        new.load_checkpoint(path=tmp_path / "other.pt", module=fresh)  # and an engine that has released nothing
        assert new.accountant.ledger == other.accountant.ledger

    def test_another_run_with_more_steps_is_refused(self, tmp_path):
        engine, model, _, _ = trained(3)
        other, its_model, _, _ = trained(10)
        save(tmp_path / "other.pt", other, its_model)
        refused(engine, model, tmp_path / "other.pt", "lists 10 of another run")

    @pytest.mark.parametrize("shared", [0, 4])
    def test_two_continuations_of_one_checkpoint_are_not_mixed(self, tmp_path, shared):
        """Same identity, same settings, equally many equal steps: yet each has released what the other has not."""
        engine, model, _, _ = trained(shared)
        save(tmp_path / "shared.pt", engine, model)
        other, its_model, its_optimizer, its_loader = setup()
        other.load_checkpoint(path=tmp_path / "shared.pt", module=its_model)
        go_on(its_model, its_optimizer, its_loader, 6)
        save(tmp_path / "other.pt", other, its_model)
        engine.load_checkpoint(
            path=tmp_path / "other.pt", module=model
        )  # the control: the first may go on as the other
        assert engine.accountant.ledger.steps == shared + 6
        twin, twin_model, twin_optimizer, twin_loader = setup()
        with pytest.warns(UserWarning, match="another engine is at step"):
            twin.load_checkpoint(path=tmp_path / "shared.pt", module=twin_model)
        go_on(twin_model, twin_optimizer, twin_loader, 6)
        assert twin.accountant.ledger.phases == other.accountant.ledger.phases
        refused(twin, twin_model, tmp_path / "other.pt", "both continued the same run")

    def test_the_second_run_of_another_engine_is_refused(self, tmp_path):
        """The steps of an engine's earlier runs count: they are on its ledger."""
        engine, model, _, _ = trained(6)
        setup(model, engine)
        other, its_model, _, _ = trained(6)
        setup(its_model, other)
        save(tmp_path / "other.pt", other, its_model)
        refused(engine, model, tmp_path / "other.pt", "lists 6 of another run")
        save(tmp_path / "own.pt", engine, model)
        engine.load_checkpoint(path=tmp_path / "own.pt", module=model)  # the control

    def test_going_back_with_a_new_engine_is_warned_of(self, tmp_path):
        """Killed and resumed, or gone back on purpose: a file cannot tell, but within a process it is known."""
        engine, model, optimizer, loader = trained(6)
        save(tmp_path / "run.pt", engine, model)
        new, fresh, _, _ = setup()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            new.load_checkpoint(path=tmp_path / "run.pt", module=fresh)  # the control: nothing came after it
        go_on(model, optimizer, loader, 3)
        del engine, optimizer, loader  # what was released stays released
        new, fresh, _, _ = setup()
        with pytest.warns(
            UserWarning, match=r"checkpoint of step 6 does not list: another engine is at step 9"
        ) as seen:
            new.load_checkpoint(path=tmp_path / "run.pt", module=fresh)
        assert seen[0].filename == __file__

    def test_the_ledger_stays_one_object(self, tmp_path):
        """Catches an account that somebody looked up before loading, and that shows nothing of it."""
        engine, model, _, _ = trained(6)
        save(tmp_path / "run.pt", engine, model)
        new, fresh, optimizer, loader = setup()
        looked_up = new.accountant.ledger
        new.load_checkpoint(path=tmp_path / "run.pt", module=fresh)
        go_on(fresh, optimizer, loader, 1)
        assert looked_up.steps == new.accountant.ledger.steps == 7


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


class TestPartsOfAnotherRun:
    """Catches a checkpoint that mixes two runs: weights of one beside the ledger of the other."""

    @pytest.mark.parametrize("method", ["save_checkpoint", "load_checkpoint"])
    def test_are_refused(self, tmp_path, method):
        engine, model, optimizer, _ = trained(2)
        _, stranger, its_optimizer, _ = trained(4)
        save(tmp_path / "run.pt", engine, model)
        use = getattr(engine, method)
        with pytest.raises(ValueError, match="not the optimizer that make_private returned last"):
            use(path=tmp_path / "run.pt", module=model, optimizer=its_optimizer)
        with pytest.raises(ValueError, match=r"not the model that was made private last.*checkpoint_dict"):
            use(path=tmp_path / "run.pt", module=stranger)
        use(path=tmp_path / "run.pt", module=model, optimizer=optimizer)  # the control

    def test_of_an_earlier_run_of_the_engine_are_refused(self, tmp_path):
        engine, model, optimizer, _ = trained(2)
        setup(model, engine)
        with pytest.raises(ValueError, match="not the optimizer"):
            engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)

    def test_a_wrapper_of_the_model_is_the_model(self, tmp_path):
        engine, model, _, _ = trained(2)
        wrapped = torch.nn.Sequential(model)
        engine.save_checkpoint(path=tmp_path / "run.pt", module=wrapped)
        engine.load_checkpoint(path=tmp_path / "run.pt", module=wrapped)


class TestWithinALogicalStep:
    """Loading drops what a logical step has summed: the rest of it must not be released as if it were whole."""

    @pytest.fixture
    def path(self, tmp_path):
        engine, model, _, _ = trained(6, max_physical_batch_size=8)
        save(tmp_path / "run.pt", engine, model)
        return tmp_path / "run.pt"

    @pytest.mark.parametrize("stepped", [False, True])
    def test_nothing_is_loaded(self, path, stepped):
        engine, model, optimizer, loader = setup(max_physical_batch_size=8, rehearsal=False)
        for x, y in loader:
            assert not loader.current.is_last
            if stepped:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            refused(engine, model, path, "middle of a logical step.*right after make_private", RuntimeError)
            break

    def test_nor_when_its_last_part_has_been_drawn(self, path):
        engine, model, optimizer, loader = setup(max_physical_batch_size=8)
        for x, y in loader:
            if loader.current.is_last:
                break
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        refused(engine, model, path, "middle of a logical step", RuntimeError)

    def test_a_batch_drawn_before_is_not_stepped_after(self, tmp_path):
        saved, model, _, _ = trained(6)
        save(tmp_path / "run.pt", saved, model)
        engine, model, optimizer, loader = setup()
        x, y = next(iter(loader))
        torch.nn.functional.cross_entropy(model(x), y).backward()
        engine.load_checkpoint(path=tmp_path / "run.pt", module=model)
        with pytest.raises(RuntimeError, match="before a batch was drawn"):
            optimizer.step()
        go_on(model, optimizer, loader, 1)  # the control: what is drawn now is
        assert engine.accountant.ledger.steps == 7


RUN = """
    import json, sys
    from pathlib import Path
    import torch
    from tests.support.private_runs import setup

    path, steps = Path(sys.argv[1]), int(sys.argv[2])
    engine, model, optimizer, loader = setup(max_physical_batch_size=16)
    if path.exists():
        engine.load_checkpoint(path=path, module=model)
    print("ready", flush=True)
    while optimizer.steps < steps:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            engine.save_checkpoint(path=path, module=model)
            if optimizer.steps == steps:
                break
    print(json.dumps({"epsilon": engine.get_epsilon(1e-3), "steps": engine.accountant.ledger.steps}))
"""


def test_a_run_killed_again_and_again_ends_with_the_same_epsilon(tmp_path):
    """A real process, killed without warning at odd moments, resumed from whatever its last checkpoint is."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN))
    path, steps = tmp_path / "run.pt", 40
    found = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": found, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(script), str(path), str(steps)]
    for kills, delay in enumerate((0.01, 0.07, 0.15)):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 30
        while kills == 0 and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert "ledger" in checkpoint.load(path), "the file is whole at every moment"
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    result = json.loads(out.splitlines()[-1])
    assert result["steps"] == steps
    assert {path.name for path in tmp_path.iterdir()} <= {"run.pt", "run.py", "__pycache__"}, "killed writers' files"
    assert result["epsilon"] == pytest.approx(epsilon(1.0, BATCH / N, steps, 1e-3), rel=1e-9)
