import math
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from tests.support.killable_runs import finished, killed, started, training_run

from spectral_dp import accounting, models
from spectral_dp.experiments import figures, trainer
from spectral_dp.experiments.recorded_run import RecordedRun
from spectral_dp.experiments.run_directory import RunDirectory, RunDirectoryError
from spectral_dp.experiments.settings import SettingsError
from spectral_dp.training import checkpoint


def epsilon(noise_multiplier, sample_rate, steps):
    return accounting.epsilon(noise_multiplier, sample_rate, steps, 1e-5, accountant="rdp")


def run(tmp_path, settings, name="run", **options):
    directory = RunDirectory(tmp_path / name)
    return trainer.run(settings, directory, **options), directory


def test_a_run_leaves_everything_that_is_promised(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(trainer, "draw_run", figures.draw_run)
    summary, directory = run(tmp_path, tiny(epsilon=2.0, epochs=3))
    names = {path.name for path in directory.path.iterdir()}
    promised = {"config.json", "metrics.jsonl", "checkpoint.pt", "layers.json", "weights.safetensors", "summary.json"}
    assert (
        promised | {"privacy.json", "privacy.md", "MODEL_CARD.md", "accuracy.png", "epsilon.png", "noise.png"} <= names
    )
    rows = directory.metrics()
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert [row["step"] for row in rows] == [4, 8, 12]
    assert 0 < rows[0]["epsilon"] < rows[2]["epsilon"] <= 2
    spent = epsilon(summary["noise_multiplier"], 0.25, 12)
    assert summary["epsilon"] == pytest.approx(spent, rel=1e-9)
    assert summary["heldout_accuracy"] == rows[-1]["heldout_accuracy"]


def test_a_run_can_be_reported_on(tmp_path, tiny):
    _, directory = run(tmp_path, tiny())
    assert RecordedRun.read(directory).settings == tiny()


def test_the_papers_signal_support_has_layer_facts_too(tmp_path, tiny):
    """Its spectra have the size of the layer's input, which only the first step tells."""
    settings = tiny(
        model="model3", conv_ratio=0.5, support="signal", band="paper", epochs=1, train_size=20, batch_size=10
    )
    _, directory = run(tmp_path, settings)
    facts = {layer["name"]: layer for layer in directory.read(directory.layers)}
    assert facts["conv1.weight"]["gains"]
    assert {fact["filtered"] for fact in facts.values()} == {True, False}
    assert all(fact["filtered"] == ("gains" in fact) for fact in facts.values())


def test_the_saved_weights_are_those_that_were_evaluated(tmp_path, tiny):
    settings = tiny(method="dpsgd", ema_decay=0.9)
    summary, directory = run(tmp_path, settings)
    model = models.build("tiny", input_shape=(1, 8, 8), classes=10)
    model.load_state_dict(load_file(directory.weights))
    _, accuracy = trainer.evaluate(model, trainer.load_data(settings), "cpu")
    assert accuracy == summary["heldout_accuracy"]


def test_decays_are_compared_on_records_that_are_left_out(tmp_path, tiny):
    compared, directory = run(tmp_path, tiny(ema_decay=0.5, ema_candidates=[0.0, 0.5, 0.99], validation_size=100))
    found = compared["accuracy_by_ema_decay"]
    assert list(found) == ["0.0", "0.5", "0.99"]
    assert found["0.5"] == compared["heldout_accuracy"] == directory.metrics()[-1]["accuracy_by_ema_decay"]["0.5"]
    alone, _ = run(tmp_path, tiny(ema_decay=0.99, validation_size=100), "alone")
    assert found["0.99"] == alone["heldout_accuracy"]
    assert alone["accuracy_by_ema_decay"] == {}


def test_training_learns_and_much_noise_prevents_it(tmp_path, tiny):
    """The second half is the control: without it, a run that ignores the noise would pass."""
    common = {"train_size": None, "test_size": None, "epochs": 5, "learning_rate": 2.0}
    learnt, _ = run(tmp_path, tiny(epsilon=8.0, **common), "learnt")
    drowned, _ = run(tmp_path, tiny(noise_multiplier=300.0, **common), "drowned")
    assert learnt["heldout_accuracy"] > 0.7
    assert drowned["heldout_accuracy"] < 0.4


@pytest.mark.parametrize("method", ["spectral", "dpsgd", "opacus", "nonprivate"])
def test_methods_run_and_say_what_they_guarantee(tmp_path, tiny, method):
    summary, directory = run(tmp_path, tiny(method=method))
    statement = directory.read(directory.privacy)
    if method == "nonprivate":
        assert summary["epsilon"] is statement.get("epsilon") is None
        assert "No privacy is guaranteed" in (directory.path / "privacy.md").read_text()
    else:
        assert summary["epsilon"] == pytest.approx(epsilon(1.0, 0.25, 8), rel=0.02)
        assert statement["steps"] == 8
        assert statement["sample_rate"] == 0.25
        assert not statement["private"]  # seeded
        assert "NOT private" in (directory.path / "privacy.md").read_text()
    assert set(load_file(directory.weights)) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}


def test_a_run_that_is_not_seeded_is_private_and_differs_each_time(tmp_path, tiny):
    weights = []
    for name in ("a", "b"):
        _, directory = run(tmp_path, tiny(reproducible=False, epochs=1), name)
        assert directory.read(directory.privacy)["private"]
        assert directory.summary()["private"]
        weights.append(load_file(directory.weights)["fc1.weight"])
    assert not torch.equal(*weights)


@pytest.mark.parametrize("method", ["opacus"])
def test_opacus_noise_does_not_come_from_the_seed(tmp_path, tiny, method):
    """Catches leaving torch's generator, from which Opacus draws, as initialisation seeded it."""
    weights = []
    for name in ("a", "b"):
        _, directory = run(tmp_path, tiny(method=method, reproducible=False, epochs=1), name)
        weights.append(load_file(directory.weights)["fc1.weight"])
    assert not torch.equal(*weights)


@pytest.mark.parametrize("method", ["spectral", "opacus", "nonprivate"])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path, tiny, method):
    averages = {"ema_decay": 0.5, "ema_candidates": [0.9], "validation_size": 100}
    settings = tiny(method=method, epochs=3, schedule="cosine", momentum=0.9, **averages)
    whole, uninterrupted = run(tmp_path, settings, "whole")

    def stop_at(step):
        def show(progress):
            if progress.step == step:
                signal.raise_signal(signal.SIGINT)

        return show

    for step in (3, 6, 9):  # within epochs
        with pytest.raises(trainer.Interrupted):
            run(tmp_path, settings, "parts", resume=True, show=stop_at(step))
    parts, resumed = run(tmp_path, settings, "parts", resume=True)
    assert parts["epsilon"] == whole["epsilon"]
    assert [row["step"] for row in resumed.metrics()] == [row["step"] for row in uninterrupted.metrics()]
    ours, theirs = load_file(resumed.weights), load_file(uninterrupted.weights)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)


def test_a_killed_process_resumes_with_its_ledger(tmp_path, tiny):
    """SIGKILL at whatever moment: the run goes on, and its epsilon is that of the steps it made."""
    settings = tiny(epochs=20, batch_size=20)
    directory = RunDirectory(tmp_path / "run")
    process, connection = started(training_run, directory.path, settings)
    deadline = time.monotonic() + 60
    while len(directory.metrics()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    killed(process, connection)
    assert directory.checkpoint.exists()
    assert not directory.is_finished
    spent = finished(*started(training_run, directory.path, settings))
    assert spent == pytest.approx(epsilon(1.0, 0.1, 200), rel=1e-9)
    assert [row["epoch"] for row in directory.metrics()] == list(range(1, 21))


def test_long_epochs_are_saved_within(tmp_path, tiny, monkeypatch):
    """Catches losing hours of a long epoch to a kill."""
    monkeypatch.setattr(trainer, "CHECKPOINT_EVERY", 0.0)
    saved = []

    def note(progress):
        saved.append(RunDirectory(tmp_path / "run").checkpoint.exists())

    run(tmp_path, tiny(epochs=1), show=note)
    assert saved[1]  # after the second of four steps


def test_tensorboard_gets_what_may_be_published(tmp_path, tiny, monkeypatch):
    written = []

    class Writer:
        def add_scalar(self, name, value, step):
            written.append((name, step))

        def close(self):
            written.append("closed")

    monkeypatch.setattr(trainer, "_tensorboard", lambda directory: Writer())
    run(tmp_path, tiny(epochs=1, unsafe_diagnostics=True))
    assert written == [("heldout_accuracy", 4), ("heldout_loss", 4), ("epsilon", 4), "closed"]


def test_a_run_that_is_killed_where_tensorboard_begins_goes_on(tmp_path, tiny, monkeypatch):
    """Catches a directory with TensorBoard's files and no settings, which nobody may go on in: a search counted that
    trial as failed."""

    def killed_here(directory):
        (directory.path / "tensorboard").mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_tensorboard", killed_here)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, tiny(epochs=1))
    summary, _ = run(tmp_path, tiny(epochs=1), resume=True)
    assert summary["steps"] == 4


def test_a_lost_checkpoint_is_not_forgotten(tmp_path, tiny):
    """Catches beginning again with a fresh ledger after weights and evaluations have been written out."""
    _, directory = run(tmp_path, tiny())
    directory.summary_file.unlink()
    directory.checkpoint.unlink()
    with pytest.raises(RunDirectoryError, match="up to step 8, but its checkpoint is gone"):
        run(tmp_path, tiny(), resume=True)


def stopped(tmp_path, settings, name, step):
    def stop(progress):
        if progress.step == step:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(trainer.Interrupted):
        run(tmp_path, settings, name, show=stop)
    return RunDirectory(tmp_path / name)


@pytest.mark.parametrize("method", ["spectral", "opacus"])
def test_the_checkpoint_of_another_run_is_refused(tmp_path, tiny, method):
    """Same settings, at least as many steps: yet its ledger lists nothing of what this directory has told."""
    settings = tiny(method=method, epochs=3)
    mine, other = stopped(tmp_path, settings, "mine", 6), stopped(tmp_path, settings, "other", 10)
    own = mine.checkpoint.read_bytes()
    mine.checkpoint.write_bytes(other.checkpoint.read_bytes())
    rows = mine.metrics()
    with pytest.raises(RunDirectoryError, match=r"evaluations up to step 4, but its checkpoint is of another run"):
        run(tmp_path, settings, "mine", resume=True)
    assert mine.metrics() == rows
    mine.checkpoint.write_bytes(own)  # the control
    summary, _ = run(tmp_path, settings, "mine", resume=True)
    assert summary["epsilon"] == pytest.approx(epsilon(1.0, 0.25, 12), rel=0.02)


def test_another_continuation_of_the_run_is_refused(tmp_path, tiny, monkeypatch):
    """A copied directory is continued twice; the checkpoint of the copy does not list what the original has told."""
    settings = tiny(epochs=3)
    stopped(tmp_path, settings, "mine", 6)
    shutil.copytree(tmp_path / "mine", tmp_path / "copy")
    for name in ("copy", "mine"):
        monkeypatch.setattr("spectral_dp.training.run._LEDGERS", [])  # as two processes would
        _, directory = run(tmp_path, settings, name, resume=True)
        directory.summary_file.unlink()
    directory.checkpoint.write_bytes((tmp_path / "copy" / "checkpoint.pt").read_bytes())
    monkeypatch.setattr("spectral_dp.training.run._LEDGERS", [])
    with pytest.raises(RunDirectoryError, match="another continuation"):
        run(tmp_path, settings, "mine", resume=True)


def test_an_edited_history_of_opacus_is_refused(tmp_path, tiny):
    settings = tiny(method="opacus", epochs=3)
    directory = stopped(tmp_path, settings, "run", 6)
    state = checkpoint.load(directory.checkpoint)
    state["state"]["ledger"]["entries"][0][1] = 50.0
    checkpoint.save(state, directory.checkpoint)
    with pytest.raises(checkpoint.CheckpointError, match="changed after it was written"):
        run(tmp_path, settings, resume=True)


@pytest.mark.parametrize("method", ["spectral", "opacus"])
def test_a_statement_names_the_ledger_it_is_of(tmp_path, tiny, method):
    _, directory = run(tmp_path, tiny(method=method))
    state = checkpoint.load(directory.checkpoint)
    ledger = state["ledger"] if method == "spectral" else state["state"]["ledger"]
    statement = directory.read(directory.privacy)
    assert statement["ledger_identity"] == ledger["identity"]
    assert statement["ledger_head"] == ledger["head"] == directory.metrics()[-1]["ledger_head"]
    assert f"- ledger head: {ledger['head']}" in (directory.path / "privacy.md").read_text()
    run(tmp_path, tiny(method=method), "other")
    (tmp_path / "run" / "privacy.json").write_bytes((tmp_path / "other" / "privacy.json").read_bytes())
    with pytest.raises(RunDirectoryError, match="the privacy of another run"):
        RecordedRun.read(directory)


def test_a_stop_at_the_very_last_step_can_be_resumed(tmp_path, tiny):
    def stop(progress):
        if progress.step == 8 and progress.epoch == 1:  # before the epoch is over
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(trainer.Interrupted):
        run(tmp_path, tiny(), show=stop)
    summary, directory = run(tmp_path, tiny(), resume=True)
    assert summary["steps"] == 8
    assert directory.layers.exists()


def test_a_delta_that_protects_nobody_is_not_called_private(tmp_path, tiny):
    with pytest.warns(UserWarning, match="delta 0.5 is not below 1/N"):
        summary, _ = run(tmp_path, tiny(delta=0.5, reproducible=False, epochs=1))
    assert not summary["private"]
    assert "protects nobody" in " ".join(summary["warnings"])


def test_tied_weights_are_saved(tmp_path, tiny, monkeypatch):
    class Tied(torch.nn.Module):
        def __init__(self, input_shape, classes):
            super().__init__()
            self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
            self.b.weight = self.a.weight
            self.c = torch.nn.Linear(64, classes)

        def forward(self, x):
            return self.c(self.b(self.a(x.flatten(1)).tanh()).tanh())

    models.register_model("tied", Tied)
    _, directory = run(tmp_path, tiny(model="tied", method="dpsgd", epochs=1))
    weights = load_file(directory.weights)
    assert torch.equal(weights["a.weight"], weights["b.weight"])


def test_settings_without_a_filter_are_said_to_be_dpsgd(tmp_path, tiny):
    with pytest.warns(UserWarning, match="plain DP-SGD"):
        run(tmp_path, tiny(linear_ratio=0.0, epochs=1))


def test_warnings_tell_nothing_of_the_batch(tmp_path, tiny):
    """How many samples a Poisson batch has is private, and warnings end up in log files."""
    with pytest.warns(RuntimeWarning, match="not finite") as caught:
        run(tmp_path, tiny(learning_rate=1e38, weight_decay=1.0))
    assert not any(character.isdigit() for warning in caught for character in str(warning.message))


def test_a_finished_run_is_not_run_again(tmp_path, tiny, monkeypatch):
    """Nor are its data loaded again: features of a data set may take an hour."""
    first, directory = run(tmp_path, tiny())
    stamp = directory.weights.stat().st_mtime_ns
    monkeypatch.setattr(trainer, "load_data", lambda settings: pytest.fail("data were loaded"))
    again, _ = run(tmp_path, tiny(), resume=True)
    assert again == first
    assert directory.weights.stat().st_mtime_ns == stamp
    with pytest.raises(RunDirectoryError, match="a finished run"):
        run(tmp_path, tiny())
    with pytest.raises(RunDirectoryError, match="other settings"):
        run(tmp_path, tiny(seed=9))


def test_physical_batches_change_nothing(tmp_path, tiny):
    _, whole = run(tmp_path, tiny(), "whole")
    _, split = run(tmp_path, tiny(max_physical_batch_size=7), "split")
    ours, theirs = load_file(whole.weights), load_file(split.weights)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


def test_physical_batches_change_nothing_of_augmentation(tmp_path, tiny):
    """Catches parts of a logical batch that all get the same random shifts."""
    augmented = {"augmentation_multiplicity": 2, "shift": 2, "flip": True}
    _, whole = run(tmp_path, tiny(**augmented), "whole")
    _, split = run(tmp_path, tiny(max_physical_batch_size=7, **augmented), "split")
    ours, theirs = load_file(whole.weights), load_file(split.weights)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in theirs)


def test_views_are_averaged_and_cost_nothing(tmp_path, tiny):
    one, _ = run(tmp_path, tiny(), "one")
    four, _ = run(tmp_path, tiny(augmentation_multiplicity=4, shift=1, flip=True), "four")
    assert one["epsilon"] == four["epsilon"]


def test_diagnostics_are_recorded_only_when_asked_for_and_change_nothing(tmp_path, tiny):
    _, plain = run(tmp_path, tiny(), "plain")
    _, watched = run(tmp_path, tiny(unsafe_diagnostics=True), "watched")
    assert not any("unsafe" in row for row in plain.metrics())
    found = watched.metrics()[-1]["unsafe"]
    assert set(found) == {"training_loss", "gradient_norm_median", "gradient_norm_90_percent", "clipped_fraction"}
    assert 0 <= found["clipped_fraction"] <= 1
    assert "NOT to be published" in (watched.path / "privacy.md").read_text()
    ours, theirs = load_file(plain.weights), load_file(watched.weights)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
def test_no_noise_means_no_guarantee(tmp_path, tiny):
    summary, directory = run(tmp_path, tiny(noise_multiplier=0.0, epochs=1))
    statement = directory.read(directory.privacy)
    assert summary["epsilon"] is None
    assert not statement["private"]
    assert "epsilon is infinite" in " ".join(statement["warnings"])


def test_the_validation_part_is_not_trained_on(tiny):
    data = trainer.load_data(tiny(train_size=None, test_size=None, validation_size=300))
    whole = trainer.load_data(tiny(train_size=None, test_size=None))
    assert len(data.train_images) == len(whole.train_images) - 300
    assert len(data.test_images) == 300
    together = torch.cat([data.train_images, data.test_images]).flatten(1)
    assert torch.equal(together.double().sum(0), whole.train_images.flatten(1).double().sum(0))
    with pytest.raises(ValueError, match="take 1 to 1436 of them, got 1000000"):
        trainer.load_data(tiny(validation_size=10**6))


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules(tmp_path, tiny, schedule):
    _, directory = run(tmp_path, tiny(schedule=schedule, method="nonprivate", learning_rate=1.0))
    last = directory.metrics()[-1]["learning_rate"]  # of step 7 of 8
    assert last == pytest.approx(
        {"constant": 1, "linear": 1 / 8, "cosine": (1 + math.cos(math.pi * 7 / 8)) / 2}[schedule]
    )


def test_bounds_of_single_layers(tmp_path, tiny):
    _, directory = run(tmp_path, tiny(clipping="per_layer", layer_max_grad_norms=[0.3, 0.4], epochs=1))
    statement = directory.read(directory.privacy)
    assert statement["max_grad_norm"] == pytest.approx(0.5)  # what one record can do in all
    assert "(0.3, 0.4)" in statement["clipping"]
    assert [layer["noise_std"] for layer in directory.read(directory.layers)] == [pytest.approx(1.0 * 0.5 / 50)] * 4
    with pytest.raises(ValueError, match="bounds"):
        run(tmp_path, tiny(clipping="per_layer", layer_max_grad_norms=[0.3], epochs=1), "wrong")


def test_impossible_settings(tmp_path, tiny):
    with pytest.raises(SettingsError, match="batch_size 500 exceeds the 200 training samples"):
        run(tmp_path, tiny(batch_size=500), "a")
    with pytest.raises(SettingsError, match="method opacus does not have augmentation_multiplicity, clipping"):
        run(tmp_path, tiny(method="opacus", augmentation_multiplicity=2, clipping="per_layer"), "b")
    with pytest.raises(SettingsError, match="cannot use device 'cuda"):
        run(tmp_path, tiny(device="cuda:7"), "c")


def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path, tiny):
    settings = tiny(epochs=3)

    def stop(progress):
        if progress.step == 5:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(trainer.Interrupted):
        run(tmp_path, settings, show=stop)
    directory = RunDirectory(tmp_path / "run")
    content = directory.checkpoint.read_bytes()
    directory.checkpoint.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="truncated, damaged"):
        run(tmp_path, settings, resume=True)
    assert directory.checkpoint.stat().st_size == len(content) // 2


def test_a_full_disk_leaves_a_run_that_can_be_resumed(tmp_path, tiny, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "write_statement", full)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path, tiny())
    directory = RunDirectory(tmp_path / "run")
    assert not directory.is_finished
    summary, _ = run(tmp_path, tiny(), resume=True)
    assert summary["steps"] == 8
