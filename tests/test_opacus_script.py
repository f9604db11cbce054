"""A training script as Opacus users write it: it runs here with nothing but its import changed."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spectral_dp import accounting

SCRIPT = """
from {library} import PrivacyEngine


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


@pytest.mark.parametrize("library", ["opacus", "spectral_dp"])
def test_the_same_script(library):
    pytest.importorskip(library)
    namespace = {"torch": torch, "nn": nn, "F": F}
    with warnings.catch_warnings():
        if library == "opacus":
            warnings.simplefilter("ignore")
        exec(SCRIPT.format(library=library), namespace)
    assert namespace["epsilons"][:2] == pytest.approx(namespace["epsilons"][2:])
    assert namespace["epsilons"][1] == pytest.approx(accounting.epsilon(1.0, 50 / 200, 8, 1e-3), rel=0.01)
