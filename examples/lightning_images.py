"""Classify scikit-learn's handwritten digits privately with Lightning.

    pip install 'spectral-dp[lightning]' scikit-learn
    python examples/lightning_images.py [--epsilon 3] [--epochs 30] [--processes 2]
    torchrun --nproc-per-node 2 examples/lightning_images.py --processes 2

The module is what it would be without privacy; the callback makes the training private. The 1,797 digits come with
scikit-learn, so that nothing is downloaded. It takes half a minute.
"""

import argparse
import logging
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp.integrations.lightning import DifferentialPrivacy

DELTA, HELD_OUT = 1e-4, 360


class Digits(lightning.LightningModule):
    def __init__(self, learning_rate: float, epochs: int) -> None:
        super().__init__()
        self.learning_rate, self.epochs = learning_rate, epochs
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(16 * 4 * 4, 32), nn.Tanh(), nn.Linear(32, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        accuracy = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=lightning.fabric.utilities.warnings.PossibleUserWarning)
    torch.set_num_threads(1)  # for so small a network, several would spend their time waiting for each other
    lightning.seed_everything(0, verbose=False)  # of the weights; noise and batches come from a secret source
    digits = load_digits()
    order = torch.randperm(len(digits.target))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(digits.target)[order]
    train = TensorDataset(images[HELD_OUT:], labels[HELD_OUT:])
    held_out = TensorDataset(images[:HELD_OUT], labels[:HELD_OUT])

    privacy = DifferentialPrivacy(target_epsilon=options.epsilon, target_delta=DELTA, max_grad_norm=0.5)
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        callbacks=[privacy],
        accelerator="cpu",
        devices=options.processes,
        strategy="ddp" if options.processes > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Digits(learning_rate=0.5, epochs=options.epochs),
        DataLoader(train, batch_size=256),
        DataLoader(held_out, batch_size=HELD_OUT),
    )
    if not trainer.is_global_zero:  # one of several processes
        return
    print(f"accuracy on {HELD_OUT} held-out digits: {trainer.callback_metrics['accuracy']:.1%}")
    print(f"epsilon {privacy.epsilon:.2f} at delta {DELTA:g}, after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
