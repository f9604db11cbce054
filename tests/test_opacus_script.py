"""Training scripts as Opacus users write them: they run here with nothing but their imports changed."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_dp import accounting

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(8, 8, 4, 2)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


data = torch.utils.data.TensorDataset(torch.randn(200, 1, 28, 28), torch.randint(10, (200,)))
train_loader = torch.utils.data.DataLoader(data, batch_size=50, num_workers=0)
epsilons = []
"""

SCRIPT = (
    """
from {library} import PrivacyEngine
"""
    + NET
    + """
for run in range(2):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)
    privacy_engine = PrivacyEngine(secure_mode=False)
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    model.train()
    for epoch in range(2):
        losses = []
        for inputs, target in train_loader:
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(model(inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epsilons.append(privacy_engine.accountant.get_epsilon(delta=1e-3))
    model.eval()
    with torch.no_grad():
        model(data.tensors[0]).argmax(dim=1)
"""
)

# Ghost clipping, a noise schedule, small physical batches, a validator and a checkpoint.
LONG_SCRIPT = (
    """
from {library} import PrivacyEngine
from {library}.utils.batch_memory_manager import BatchMemoryManager
from {library}.validators import ModuleValidator
from opacus.schedulers import ExponentialNoise
"""
    + NET
    + """
def make():
    model = Net()
    if not ModuleValidator.is_valid(model):
        model = ModuleValidator.fix(model)
    errors = ModuleValidator.validate(model, strict=False)
    assert not errors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    privacy_engine = PrivacyEngine()
    model, optimizer, criterion, loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(reduction="mean"),
        data_loader=train_loader,
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    return privacy_engine, model, optimizer, criterion, loader, ExponentialNoise(optimizer, gamma=0.8)


def train(model, optimizer, criterion, loader):
    model.train()
    losses, accuracies = [], []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=20, optimizer=optimizer) as memory_safe_loader:
        for images, target in memory_safe_loader:
            assert len(images) <= 20
            optimizer.zero_grad()
            output = model(images)
            loss = criterion(output, target)
            accuracies.append((output.detach().argmax(1) == target).float().mean())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())


privacy_engine, model, optimizer, criterion, loader, noise_scheduler = make()
assert isinstance(loader, torch.utils.data.DataLoader)
assert len(loader) == len(train_loader)
for epoch in range(2):
    train(model, optimizer, criterion, loader)
    noise_scheduler.step()
    epsilons.append(privacy_engine.get_epsilon(1e-3))
privacy_engine.save_checkpoint(
    path=checkpoint, module=model, optimizer=optimizer, noise_scheduler=noise_scheduler
)

privacy_engine, model, optimizer, criterion, loader, noise_scheduler = make()
privacy_engine.load_checkpoint(
    path=checkpoint, module=model, optimizer=optimizer, noise_scheduler=noise_scheduler
)
epsilons.append(privacy_engine.get_epsilon(1e-3))
noise_after_resuming = optimizer.noise_multiplier
optimizer.original_optimizer.param_groups[0]["lr"] = 0.01
train(model, optimizer, criterion, loader)
noise_scheduler.step()
epochs_scheduled = noise_scheduler.last_epoch
epsilons.append(privacy_engine.get_epsilon(1e-3))
expected_batch_size, max_grad_norm = optimizer.expected_batch_size, optimizer.max_grad_norm
"""
)


def run(script, library, **names):
    pytest.importorskip(library)
    namespace = {"torch": torch, "nn": nn, "F": F, **names}
    with warnings.catch_warnings():
        if library == "opacus":
            warnings.simplefilter("ignore")
        exec(script.format(library=library), namespace)
    return namespace


@pytest.mark.parametrize("library", ["opacus", "spectral_dp"])
def test_the_same_script(library):
    namespace = run(SCRIPT, library)
    assert namespace["epsilons"][:2] == pytest.approx(namespace["epsilons"][2:])
    assert namespace["epsilons"][1] == pytest.approx(accounting.epsilon(1.0, 50 / 200, 8, 1e-3), rel=0.01)


@pytest.mark.parametrize("library", ["opacus", "spectral_dp"])
def test_the_same_script_with_ghost_clipping_a_schedule_and_small_physical_batches(library, tmp_path):
    pytest.importorskip("opacus")
    after = run(LONG_SCRIPT, library, checkpoint=tmp_path / "checkpoint.pt")
    ledger = accounting.Ledger()
    spent = []
    for epoch in range(3):
        # Opacus forgets in its checkpoint what its scheduler has set: the resumed run begins with the first noise.
        sigma = 2.0 if library == "opacus" and epoch == 2 else 2.0 * 0.8**epoch
        for _ in range(4):
            ledger.record(sigma, 50 / 200)
        spent.append(ledger.epsilon(1e-3))
    assert after["epsilons"] == pytest.approx([spent[0], spent[1], spent[1], spent[2]], abs=0.02)
    assert after["noise_after_resuming"] == pytest.approx(2.0 if library == "opacus" else 2.0 * 0.8**2)
    assert (after["expected_batch_size"], after["max_grad_norm"], after["epochs_scheduled"]) == (50, 1.0, 3)
