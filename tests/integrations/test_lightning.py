"""Lightning trains privately: its steps are the ledger's, and nothing of the raw data is logged."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tests.support import trainer_programs
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

from spectral_dp import CheckpointError, PoissonLoader, PrivacyEngine, RehearsalError, accounting
from spectral_dp.accounting import Ledger
from spectral_dp.training.coins import SeededCoins

lightning = pytest.importorskip("lightning", reason="needs the extra spectral-dp[lightning]")

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper  # noqa: E402

from spectral_dp.integrations.lightning import DifferentialPrivacy, _of_all_processes, _refuse  # noqa: E402

# Advice of Lightning, and its packages about each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec."),
    pytest.mark.filterwarnings("ignore:.*is not logged, nor is anything else"),
]

RECORDS, BATCH, DELTA, SEED = 60, 12, 1e-3, 5


class Classifier(lightning.LightningModule):
    def __init__(self, learning_rate=0.1, optimizer=torch.optim.SGD):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.learning_rate, self.optimizer = learning_rate, optimizer

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(*batch))

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(count=RECORDS):
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator))


def privacy(**options):
    return DifferentialPrivacy(**{"target_delta": DELTA, "max_grad_norm": 1.0, "noise_multiplier": 1.5} | options)


def trainer(path, *callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    others = {"max_epochs": 2, "enable_checkpointing": False, "default_root_dir": path}
    return lightning.Trainer(callbacks=list(callbacks), **quiet | others | options)


def fit(path, callback, module=None, *, batch_size=BATCH, ckpt_path=None, callbacks=(), **options):
    torch.manual_seed(0)
    module = module or Classifier()
    run = trainer(path, callback, *callbacks, **options)
    run.fit(module, DataLoader(data(), batch_size=batch_size), ckpt_path=ckpt_path)
    return run, module


def seeded():
    return PrivacyEngine(seed=SEED, reproducibility_over_privacy=True)


def coins():
    return SeededCoins(SEED, reproducibility_over_privacy=True)


def weights(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def clipped_sum(module, x, y, bound):
    """By a loop over samples."""
    total = [torch.zeros_like(p) for p in module.parameters()]
    for i in range(len(x)):
        gradients = torch.autograd.grad(module.loss(x[i : i + 1], y[i : i + 1]), list(module.parameters()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for sum_, gradient in zip(total, gradients, strict=True):
            sum_ += min(1.0, bound / norm) * gradient
    return dict(zip(dict(module.named_parameters()), total, strict=True))


def test_epsilon_is_that_of_the_steps_that_were_run(tmp_path):
    callback = privacy(max_physical_batch_size=4)
    run, _ = fit(tmp_path, callback)
    assert run.global_step == callback.engine.accountant.ledger.steps == 10
    assert callback.epsilon == accounting.epsilon(1.5, BATCH / RECORDS, 10, DELTA)
    assert run.callback_metrics["epsilon"] == pytest.approx(callback.epsilon)


@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_steps": 7}, {"limit_train_batches": 2, "max_epochs": 3}])
def test_a_target_is_spent_by_the_planned_steps_and_not_exceeded(tmp_path, options):
    callback = privacy(target_epsilon=3.0, noise_multiplier=None)
    run, _ = fit(tmp_path, callback, **options)
    assert run.global_step == callback.engine.accountant.ledger.steps in (10, 7, 6)
    assert 2.9 < callback.epsilon <= 3.0


@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
@pytest.mark.parametrize("size", [4, None])
def test_the_release_is_the_clipped_sum_over_a_public_constant(tmp_path, size):
    """Without noise, in one physical batch or several: the weights move as a loop over samples says."""
    torch.manual_seed(0)
    module = Classifier(learning_rate=1.0)
    loader = PoissonLoader(data(), batch_size=BATCH, coins=coins())
    expected, before = clipped_sum(module, *next(iter(loader)), 0.5), weights(module)
    callback = privacy(noise_multiplier=0.0, max_grad_norm=0.5, max_physical_batch_size=size, engine=seeded())
    fit(tmp_path, callback, module, max_steps=1)
    for name, value in weights(module).items():
        torch.testing.assert_close(before[name] - value, expected[name] / BATCH, rtol=1e-4, atol=1e-6)


def test_negative_control_plain_lightning_does_something_else(tmp_path):
    torch.manual_seed(0)
    module = Classifier(learning_rate=1.0)
    loader = PoissonLoader(data(), batch_size=BATCH, coins=coins())
    batch = next(iter(loader))
    expected, before = clipped_sum(module, *batch, 0.5), weights(module)
    run = trainer(tmp_path, max_steps=1, gradient_clip_val=0.5, log_every_n_steps=1)
    run.fit(module, DataLoader(TensorDataset(*batch), batch_size=len(batch[0])))
    moved = {name: before[name] - value for name, value in weights(module).items()}
    assert any((moved[name] - expected[name] / BATCH).norm() > 0.05 * moved[name].norm() for name in moved)


@pytest.mark.parametrize("killed_at", [3, 5, 7])
def test_a_run_that_was_killed_goes_on_with_its_ledger(tmp_path, killed_at):
    """Within an epoch or at its end; with everything seeded, the weights are those of a run that nobody disturbed."""

    class Kill(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == killed_at:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")
                raise KeyboardInterrupt

    def make():
        return privacy(engine=seeded(), max_physical_batch_size=4), Classifier(optimizer=torch.optim.Adam)

    whole, module = make()
    fit(tmp_path, whole, module)
    killed, other = make()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, killed, other, callbacks=[Kill()])
    assert killed.engine.accountant.ledger.steps == killed_at
    resumed, again = make()
    run, _ = fit(tmp_path, resumed, again, ckpt_path=tmp_path / "saved.ckpt")
    assert run.global_step == resumed.engine.accountant.ledger.steps == 10
    assert resumed.epsilon == whole.epsilon
    assert resumed.engine.accountant.ledger.continues(killed.engine.accountant.ledger)
    for name, value in weights(module).items():
        torch.testing.assert_close(weights(again)[name], value, rtol=0, atol=0)


def test_a_checkpoint_without_its_ledger_is_refused(tmp_path):
    run = trainer(tmp_path, max_epochs=1)
    run.fit(Classifier(), DataLoader(data(), batch_size=BATCH))
    run.save_checkpoint(tmp_path / "plain.ckpt")
    callback = privacy()
    with pytest.raises(CheckpointError, match="does not say what its training has spent"):
        fit(tmp_path, callback, ckpt_path=tmp_path / "plain.ckpt")
    assert callback.engine.accountant.ledger.steps == 0


def test_an_edited_checkpoint_is_refused(tmp_path):
    run, _ = fit(tmp_path, privacy(), max_steps=3)
    run.save_checkpoint(path := tmp_path / "saved.ckpt")
    saved = torch.load(path, weights_only=False)
    saved["spectral_dp"]["steps"] = 1
    torch.save(saved, path)
    with pytest.raises(CheckpointError, match="changed"):
        fit(tmp_path, privacy(), max_steps=6, ckpt_path=path)


def test_a_checkpoint_is_not_larger_than_it_must_be(tmp_path):
    """Weights and their sealed copy are the same tensors."""
    run, _ = fit(tmp_path, privacy(), Classifier(optimizer=torch.optim.Adam), max_steps=1)
    run.save_checkpoint(path := tmp_path / "saved.ckpt")
    saved = torch.load(path, weights_only=False)
    for name, value in saved["state_dict"].items():
        assert value.data_ptr() == saved["spectral_dp"]["module"][name].data_ptr()


@pytest.mark.filterwarnings("ignore:the budget of epsilon")
def test_fitting_again_goes_on_within_the_budget(tmp_path):
    callback = privacy(target_epsilon=3.0, noise_multiplier=None)
    _, module = fit(tmp_path, callback, max_steps=4)
    again = trainer(tmp_path, callback, max_epochs=3)
    again.fit(module, DataLoader(data(), batch_size=BATCH))
    assert again.global_step == 0
    assert again.should_stop
    assert callback.engine.accountant.ledger.steps == 4


def test_nothing_of_the_raw_data_is_logged(tmp_path):
    callback = privacy()
    run = trainer(tmp_path, callback)
    with pytest.warns(UserWarning, match="'train_loss' is not logged"):
        run.fit(Classifier(), DataLoader(data(), batch_size=BATCH), DataLoader(data(20), batch_size=10))
    assert set(run.callback_metrics) == {"epsilon", "val_loss"}


def test_it_is_logged_when_asked_for(tmp_path):
    run, _ = fit(tmp_path, privacy(unsafe_diagnostics=True, max_physical_batch_size=4))
    assert set(run.callback_metrics) == {"epsilon", "train_loss"}


@pytest.mark.parametrize("world_size", [1, 2])
def test_processes_are_not_made_to_wait_for_each_others_figures(world_size):
    """Each makes as many passes as its shard needs: a collective operation in a pass would hang."""
    logged = []
    module = SimpleNamespace(log=lambda name, value, **options: logged.append(name))
    log = privacy(unsafe_diagnostics=True)._private_log(SimpleNamespace(training=True, world_size=world_size), module)
    log("own", 1.0)
    with pytest.raises(ValueError, match="leave sync_dist out") if world_size > 1 else nullcontext():
        log("of all", 1.0, sync_dist=True)
    assert logged == ["own", "of all"][: 3 - world_size]


def test_metrics_of_validation_count_and_those_of_training_are_refused(tmp_path):
    torchmetrics = pytest.importorskip("torchmetrics")

    class WithMetric(Classifier):
        def __init__(self, in_training):
            super().__init__()
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
            self.in_training = in_training

        def training_step(self, batch, batch_idx):
            if self.in_training:
                self.accuracy(self.net(batch[0]), batch[1])
            return self.loss(*batch)

        def validation_step(self, batch, batch_idx):
            self.accuracy(self.net(batch[0]), batch[1])
            self.log("accuracy", self.accuracy)

    run = trainer(tmp_path, privacy())
    run.fit(WithMetric(False), DataLoader(data(), batch_size=BATCH), DataLoader(data(20), batch_size=10))
    assert "accuracy" in run.callback_metrics
    with pytest.raises(RehearsalError, match="accuracy"):
        fit(tmp_path, privacy(), WithMetric(True))


def test_empty_batches_are_steps(tmp_path):
    callback = privacy()
    run, _ = fit(tmp_path, callback, batch_size=1, max_steps=12)
    assert run.global_step == callback.engine.accountant.ledger.steps == 12


def test_mixed_precision_in_bfloat16(tmp_path):
    callback = privacy(max_physical_batch_size=4)
    fit(tmp_path, callback, precision="bf16-mixed")
    assert callback.engine.accountant.ledger.steps == 10


def test_a_loss_that_couples_records_is_refused(tmp_path):
    class Coupled(Classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return self.loss(x - x.mean(0), y)

    callback = privacy()
    with pytest.raises(RehearsalError):
        fit(tmp_path, callback, Coupled())
    assert callback.engine.accountant.ledger.steps == 0


def test_batches_cannot_be_skipped(tmp_path):
    class Skips(Classifier):
        def training_step(self, batch, batch_idx):
            return None if self.trainer.global_step == 2 else self.loss(*batch)

    callback = privacy()
    with pytest.raises(RuntimeError, match="training_step returned None"):
        fit(tmp_path, callback, Skips())


def test_the_module_is_an_ordinary_one_afterwards(tmp_path):
    _, module = fit(tmp_path, privacy(), max_steps=2)
    assert {"training_step", "log"}.isdisjoint(module.__dict__)
    module.loss(*data().tensors).backward()
    assert all(p.grad is not None for p in module.parameters())


def test_training_step_may_take_the_batch_alone(tmp_path):
    class Short(Classifier):
        def training_step(self, batch):
            return {"loss": self.loss(*batch)}

    run, _ = fit(tmp_path, privacy(max_physical_batch_size=4), Short())
    assert run.global_step == 10


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"accumulate_grad_batches": 2}, "max_physical_batch_size"),
        ({"gradient_clip_val": 0.5}, "max_grad_norm"),
        ({"overfit_batches": 2}, "Subset"),
        ({"reload_dataloaders_every_n_epochs": 1}, "leave it out"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(tmp_path, options, fix):
    with pytest.raises(ValueError, match=fix):
        fit(tmp_path, privacy(), **options)


def test_several_loaders_are_refused(tmp_path):
    loaders = [DataLoader(data(), batch_size=BATCH) for _ in range(2)]
    with pytest.raises(ValueError, match="a single training DataLoader"):
        trainer(tmp_path, privacy()).fit(Classifier(), loaders)


def test_manual_optimization_is_refused(tmp_path):
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="leave the steps to Lightning"):
        fit(tmp_path, privacy(), Manual())


def test_a_scaler_that_skips_steps_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lightning.Trainer, "precision", property(lambda self: "16-mixed"))
    with pytest.raises(ValueError, match="bf16-mixed"):
        fit(tmp_path, privacy())


def test_processes_that_take_the_ledger_with_them_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r'Trainer\(strategy="ddp"\)'):
        _refuse(trainer(tmp_path, strategy="ddp_spawn", devices=2), Classifier())


def test_processes_that_do_not_know_each_other_are_refused(tmp_path, monkeypatch):
    """Catches torchrun with a Trainer of one device: each process would spend a budget of its own."""
    run = trainer(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r'use Trainer\(devices=2, strategy="ddp"\)'):
        _refuse(run, Classifier())


def test_a_model_that_was_wrapped_is_refused(tmp_path):
    run, module = trainer(tmp_path), Classifier()
    run.strategy.model = nn.Sequential(module)
    with pytest.raises(ValueError, match="give fit the module itself"):
        _refuse(run, module)


PROGRAM = "tests.support.trainer_programs:lightning_program"


def test_several_processes_train_what_one_trains(tmp_path, processes):
    """From the weights of the first, on Poisson batches of all records; rank 0 writes the checkpoint."""
    alone, _, _, _, metrics = trainer_programs.lightning_run(str(tmp_path / "alone"))
    (first, ledger, _, steps, measured), (second, other, *_) = processes.run(
        2, PROGRAM, str(tmp_path / "both"), {}, timeout=60.0
    )
    assert steps == 10
    assert torch.equal(first, second)
    assert ledger == other
    torch.testing.assert_close(first, alone, rtol=1e-5, atol=1e-6)
    assert measured["val_loss"] == pytest.approx(metrics["val_loss"], rel=1e-4)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path, processes):
    whole, *_ = trainer_programs.lightning_run(str(tmp_path / "whole"))
    processes.run(2, PROGRAM, str(tmp_path), {"epochs": 1}, timeout=60.0)
    resumed, ledger, _, steps, _ = trainer_programs.lightning_run(str(tmp_path), ckpt_path=str(tmp_path / "last.ckpt"))
    assert steps == Ledger.from_state_dict(ledger).steps == 10
    torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)


def test_a_budget_stops_all_processes(tmp_path, processes):
    """With the noise of a private run."""
    options = {"privacy": {"target_epsilon": 3.0}, "seed": None, "epochs": 1}
    (first, ledger, spent, steps, _), (second, other, *_) = processes.run(
        2, PROGRAM, str(tmp_path), options, timeout=60.0
    )
    assert torch.equal(first, second)
    assert (steps, ledger) == (5, other)
    assert 2.9 < spent <= 3.0


def test_a_sampler_of_ones_own_is_refused_also_if_lightning_wraps_it(tmp_path):
    """Catches a choice of records that is silently replaced by Poisson sampling."""
    weighted = WeightedRandomSampler([1.0] * RECORDS, RECORDS)
    loader = DataLoader(data(), batch_size=BATCH, sampler=DistributedSamplerWrapper(weighted, num_replicas=2, rank=0))
    assert _of_all_processes(loader) is loader
    plain = DataLoader(data(), batch_size=BATCH, sampler=DistributedSampler(data(), num_replicas=2, rank=0))
    assert (_of_all_processes(plain).sample_rate, len(_of_all_processes(plain))) == (BATCH / RECORDS, RECORDS // BATCH)


@pytest.mark.parametrize("how", ["tuner", "learning rate", "batch size"])
def test_tuners_are_refused_before_they_see_a_record(tmp_path, how):
    """They take the callbacks away and train in plain: a learning rate was chosen by raw losses, with no entry."""
    seen = []

    class Watched(Classifier):
        batch_size = BATCH

        def train_dataloader(self):
            return DataLoader(data(), batch_size=self.batch_size)

        val_dataloader = train_dataloader

        def training_step(self, batch, batch_idx):
            seen.append(batch)
            return super().training_step(batch, batch_idx)

    finders = {"learning rate": lightning.pytorch.callbacks.LearningRateFinder(num_training_steps=5)}
    finders["batch size"] = lightning.pytorch.callbacks.BatchSizeFinder(steps_per_trial=1, max_trials=1)
    run = trainer(tmp_path, privacy(), *([finders[how]] if how in finders else []), enable_checkpointing=True)
    train = run.fit if how in finders else lightning.pytorch.tuner.Tuner(run).lr_find
    with pytest.raises(ValueError, match="without privacy"):
        train(Watched())
    assert not seen


def test_control_a_tuner_trains_without_the_callback(tmp_path, monkeypatch):
    """What is refused above: records are trained on, and the ledger is empty."""
    monkeypatch.setattr(DifferentialPrivacy, "setup", lambda *_, **__: None)
    callback, losses = privacy(), []

    class Watched(Classifier):
        def training_step(self, batch, batch_idx):
            losses.append(super().training_step(batch, batch_idx))
            return losses[-1]

    tuner = lightning.pytorch.tuner.Tuner(trainer(tmp_path, callback, enable_checkpointing=True))
    tuner.lr_find(Watched(), DataLoader(data(), batch_size=BATCH), num_training=5)
    assert losses
    assert callback.engine.accountant.ledger.steps == 0


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_training_goes_on_after_an_earlier_checkpoint_was_tested(tmp_path):
    """The ledger that the tested file holds is older than that of the engine, which has every step of both."""

    class Tested(Classifier):
        def test_step(self, batch, batch_idx):
            self.loss(*batch)

    saver = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    callback = privacy()
    run, module = fit(tmp_path, callback, Tested(), callbacks=[saver], enable_checkpointing=True, max_epochs=1)
    steps = callback.engine.accountant.ledger.steps
    first = min(tmp_path.glob("saved/*.ckpt"), key=lambda path: path.stat().st_mtime)
    run.test(module, DataLoader(data(), batch_size=BATCH), ckpt_path=first, weights_only=False, verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(module, DataLoader(data(), batch_size=BATCH))
    assert callback.engine.accountant.ledger.steps == 2 * steps
