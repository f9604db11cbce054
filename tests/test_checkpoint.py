"""Nothing is lost: atomic files, refused damage, and a killed process that resumes with its ledger intact."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from test_engine import BATCH, N, cnn, setup, task, train, weights

from spectral_dp import CheckpointError, PrivacyEngine, SpectralConfig, checkpoint
from spectral_dp.accounting import epsilon
from spectral_dp.filters import Adaptive, Filter
from spectral_dp.gains import Gains


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
        assert second.accountant.ledger == engine.accountant.ledger
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
        config = SpectralConfig(conv_filter=Adaptive())
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
        with pytest.raises(CheckpointError, match=r"12 steps.*step 6"):
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

    def test_a_ledger_that_does_not_match_is_refused(self, tmp_path):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        state = checkpoint.load(tmp_path / "run.pt")
        state["ledger"]["phases"][0][2] = 1  # a step instead of six: a smaller epsilon
        checkpoint.save(state, tmp_path / "run.pt")
        second, resumed, _, _ = setup()
        with pytest.raises(CheckpointError, match="ledger lists 1 steps"):
            second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)


RUN = """
    import json, sys
    from pathlib import Path
    import torch
    from test_engine import setup

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
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
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
    assert result["epsilon"] == pytest.approx(epsilon(1.0, BATCH / N, steps, 1e-3), rel=1e-9)
