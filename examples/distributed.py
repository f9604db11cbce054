"""Train one private model in several processes: the ordinary script, with init_process_group before make_private.

    torchrun --nproc-per-node 2 examples/distributed.py [--epochs 5] [--checkpoint run.pt]
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
        torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed.py --checkpoint run.pt

Each process draws Poisson batches from its own shard of the records, clips them, and adds its share of the noise. One
all-reduce a step adds what the filter keeps. The batch size, the learning rate and epsilon are those of the whole run,
so they are the same for any number of processes. With --checkpoint a run that lost a process goes on where it was,
with as many processes as there are then (docs/distributed.md says what the variable is for). The data are generated,
so that nothing needs to be downloaded.
"""

import argparse
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine, SpectralConfig

SIZE, CLASSES, BATCH, DELTA = 16, 4, 200, 1e-5


def smooth_images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)  # the same records in every process
    coarse = torch.randn(CLASSES, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    patterns = nn.functional.interpolate(coarse, size=SIZE, mode="bicubic")
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(patterns[labels] + 3 * torch.randn(count, 1, SIZE, SIZE, generator=generator), labels)


def train(epsilon: float, epochs: int, checkpoint: Path | None) -> tuple[float, float]:
    """Returns accuracy on fresh images, and the epsilon spent; the same in every process."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,  # not wrapped in DistributedDataParallel; every process gets the parameters of rank 0
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(smooth_images(4000, 1), batch_size=BATCH),  # the batch of all processes together
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        spectral=SpectralConfig(linear_ratio=0.9, input_layouts={"1": (1, SIZE, SIZE)}),
    )
    if checkpoint is not None and checkpoint.exists():
        engine.load_checkpoint(path=checkpoint, module=model)
    while optimizer.steps < epochs * len(loader):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if checkpoint is not None:
            engine.save_checkpoint(path=checkpoint, module=model)  # rank 0 writes
    with torch.no_grad():
        images, labels = smooth_images(2000, 2).tensors
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    return accuracy, engine.get_epsilon(DELTA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # How long a process waits for the others before it ends with an error that names the one that is missing.
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    accuracy, spent = train(args.epsilon, args.epochs, args.checkpoint)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes: accuracy {100 * accuracy:.1f} %, epsilon {spent:.3f} at {DELTA:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
