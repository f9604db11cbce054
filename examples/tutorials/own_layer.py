"""Write a rule for a layer of your own."""

# %% [markdown]
# # Write a rule for a layer of your own
#
# A *rule* says how the gradient of one record is computed in a layer. The usual layers have one. A layer of your own
# has none: it still trains, exactly and privately, but each record goes through it by itself, which is slow. On this
# page we give a layer a rule and make it fast.
#
# ## The layer
#
# A gate that scales each channel by a sigmoid of a weight.

# %%
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine

torch.manual_seed(0)


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):  # (B, width)
        return x * torch.sigmoid(self.weight)


data = TensorDataset(torch.randn(400, 32), torch.randint(2, (400,)))


def private_step(seed):
    """One step with seeded noise and batches, so that two of them can be compared; returns the weight of the gate."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 32), Gate(32), nn.Linear(32, 2))
    engine = PrivacyEngine(seed=seed, reproducibility_over_privacy=True)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=100), noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model[1].weight.detach().clone()


with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    slow = private_step(seed=0)
print(next(str(warning.message) for warning in said if "Gate" in str(warning.message)))

# %% [markdown]
# It trained, and a warning says what to do about the speed.
#
# ## The rule
#
# The gradient of one record is `dA * x * s * (1 - s)` with `s = sigmoid(weight)`: `x` is what went in, `dA` what came
# back. `form` returns it for all records at once, the batch in front.

# %%
from spectral_dp.gradients import Rule, register_rule


@register_rule(Gate)
class GateRule(Rule[Gate]):
    """x (B, n), dA (B, n); the gradient of a sample is dA x s (1 - s)."""

    def form(self, x, dA):
        s = torch.sigmoid(self.module.weight.detach().to(self.dtype))
        return {"weight": dA.to(self.dtype) * x.to(self.dtype) * s * (1 - s)}


fast = private_step(seed=0)
print(f"largest difference between both: {(slow - fast).abs().max():.1e}")

# %% [markdown]
# The same seed, the same batches, the same noise: the weights agree to rounding.
#
# ## Test it as the built-in rules are tested
#
# Compare with a loop over records and ordinary autograd, in float64. This is the only test that matters: a rule that
# gives too small a gradient would clip too little, and the guarantee would be gone.

# %%
gate = Gate(5).double()
with torch.no_grad():
    gate.weight.copy_(torch.randn(5))
x, dA = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
loop = torch.stack([torch.autograd.grad(gate(x[b : b + 1]), gate.weight, dA[b : b + 1])[0] for b in range(7)])
s = torch.sigmoid(gate.weight.detach())
formed = dA * x * s * (1 - s)
print(f"largest difference to the loop: {(loop - formed).abs().max():.1e}")
wrong = dA * x * s  # the factor (1 - s) forgotten: the check must notice
print(f"with a mistake in the rule:     {(loop - wrong).abs().max():.1e}")

# %% [markdown]
# ## When the layer changes
#
# A rule is valid for the `forward` that the layer had when the rule was registered. A subclass with another `forward`
# does not use it, and is run record by record again. So nobody gets a wrong gradient by inheriting.


# %%
class SquaredGate(Gate):
    def forward(self, x):
        return x * torch.sigmoid(self.weight) ** 2


Gate_before, Gate = Gate, SquaredGate
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    private_step(seed=0)
print(any("SquaredGate" in str(warning.message) for warning in said), "- it goes by the slow and exact way")

# %% [markdown]
# If forming the gradients takes too much memory, subclass `GhostRule` and give norms and sums without them. [Write
# rules, filters and noise](../extending.md) says how, and what a rule must guarantee.
