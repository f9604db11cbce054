"""The same small private run, set up by this library or by Opacus."""

import importlib
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

N, BATCH = 48, 16


def records(n=N, width=4):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, width, generator=generator), torch.randint(3, (n,), generator=generator))


def private_run(library="spectral_dp", *, model=None, engine=None, dataset=None, batch=BATCH, **options):
    """Returns the engine and what its ``make_private`` returned."""
    if model is None:
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    with warnings.catch_warnings():
        if library == "opacus":
            warnings.simplefilter("ignore")
        engine = engine or importlib.import_module(library).PrivacyEngine()
        return engine, *engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(dataset or records(), batch_size=batch),
            **options,
        )


def train(model, optimizer, loader, criterion=None, after_step=lambda: None):
    """One epoch, as most scripts write it."""
    criterion = criterion or nn.CrossEntropyLoss()
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        after_step()
