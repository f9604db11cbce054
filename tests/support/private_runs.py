"""A small private run: a task that can be learnt, a network, and the usual loop."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine

N, BATCH = 240, 40


def task(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 6, 6, generator=generator)
    y = (x.flatten(1) @ torch.randn(36, 3, generator=generator)).argmax(1)
    return TensorDataset(x, y)


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


def setup(model=None, engine=None, *, dataset=None, batch_size=BATCH, lr=0.1, seed=7, **options):
    model = model or cnn()
    engine = engine or PrivacyEngine(seed=seed, reproducibility_over_privacy=True)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    private = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data_loader=DataLoader(dataset or task(), batch_size=batch_size, shuffle=True),
        **options,
    )
    return engine, *private


def train(model, optimizer, loader, epochs=1, reduction="mean"):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
