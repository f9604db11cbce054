"""What ranks do in tests of the trainers of transformers and Lightning (see ``processes.py``)."""

import contextlib
import os
import warnings
from pathlib import Path
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine

RECORDS, BATCH, DELTA, SEED = 60, 12, 1e-3, 5


def engine(seed):
    """An engine whose runs can be repeated; with the noise of a private run if there is no seed."""
    return PrivacyEngine(seed=seed, reproducibility_over_privacy=seed is not None)


def records():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(RECORDS, 6, generator=generator), torch.randint(3, (RECORDS,), generator=generator)
    )


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Classifier(nn.Module):
    """A model for the Trainer of transformers."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.out(torch.tanh(self.hidden(x)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@contextlib.contextmanager
def started_by_torchrun():
    """The environment variables that it sets, beyond those of the pool; the group is there already."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    names = {"TORCHELASTIC_RUN_ID": "test", "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with mock.patch.dict(os.environ, names if size > 1 else {}):
        yield size


def transformers_run(path, *, epochs=2, noise_multiplier=0.0, seed=SEED, resume=False, privacy=None):
    """Trains with ``PrivateTrainer``; returns weights, ledger, epsilon, steps, logs and metrics of this rank."""
    import transformers
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from spectral_dp.integrations.transformers import PrivacyArguments, PrivateTrainer

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # they outlive the process group of an earlier test
    transformers.utils.logging.set_verbosity_error()
    data = [{"x": x, "labels": y} for x, y in records()]
    settings = {"target_delta": DELTA, "per_sample_max_grad_norm": 1.0, "expected_batch_size": BATCH}
    with started_by_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = PrivateTrainer(
            Classifier(),
            transformers.TrainingArguments(
                output_dir=path,
                num_train_epochs=epochs,
                per_device_train_batch_size=4,
                logging_steps=2,
                save_strategy="epoch",
                eval_strategy="epoch",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                learning_rate=0.1,
                lr_scheduler_type="constant",
                optim="sgd",
            ),
            privacy=PrivacyArguments(**settings, **(privacy or {"noise_multiplier": noise_multiplier})),
            engine=engine(seed),
            train_dataset=data,
            eval_dataset=data[:16],
        )
        with torch.no_grad():
            for parameter in trainer.model.parameters():  # ranks begin with other weights, as careless scripts do
                parameter.fill_(0.1).mul_(1 + _rank())
        trainer.train(resume_from_checkpoint=resume or None)
    ledger = trainer.engine.accountant.ledger.state_dict()
    wrapped = type(trainer.model_wrapped).__name__
    return flat(trainer.model), ledger, trainer.epsilon, trainer.state.global_step, trainer.state.log_history, wrapped


def lightning_run(path, *, epochs=2, noise_multiplier=0.0, seed=SEED, ckpt_path=None, strategy="ddp", privacy=None):
    """Trains with the callback; returns weights, ledger, epsilon, steps and metrics of this rank."""
    import lightning

    from spectral_dp.integrations.lightning import DifferentialPrivacy

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    options = privacy or {"noise_multiplier": noise_multiplier}
    callback = DifferentialPrivacy(
        target_delta=DELTA, max_grad_norm=1.0, max_physical_batch_size=4, engine=engine(seed), **options
    )
    module = Module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.1).mul_(1 + _rank())
    with started_by_torchrun() as size, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            callbacks=[callback],
            max_epochs=epochs,
            accelerator="cpu",
            devices=size,
            strategy=strategy if size > 1 else "auto",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=path,
        )
        data = records()
        loaders = DataLoader(data, batch_size=BATCH, shuffle=True), DataLoader(data, batch_size=10)
        trainer.fit(module, *loaders, ckpt_path=ckpt_path)
        trainer.save_checkpoint(Path(path) / "last.ckpt")
    ledger = callback.engine.accountant.ledger.state_dict()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return flat(module), ledger, callback.epsilon, trainer.global_step, metrics


def _rank():
    return dist.get_rank() if dist.is_initialized() else 0


# With options by position, as the pool hands them out.


def wrapped_by_accelerate(path):
    """A version of accelerate that wraps the model whatever it is told."""
    from spectral_dp.integrations.transformers import PrivateTrainer, Trainer

    with mock.patch.object(
        PrivateTrainer, "create_accelerator_and_postprocess", Trainer.create_accelerator_and_postprocess
    ):
        transformers_run(path)


def transformers_program(path, options):
    return transformers_run(path, **options)


def lightning_program(path, options):
    return lightning_run(path, **options)
