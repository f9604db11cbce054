"""Make a PyTorch script private in three lines."""

# %% [markdown]
# # Make a PyTorch script private
#
# We take an ordinary training script and change three lines. You need nothing but the library: the data are the
# handwritten digits that come with scikit-learn.
#
# ## The script before
#
# Nothing here is private. A network reads 1,437 images of 8 x 8 pixels.

# %%
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
labels = torch.tensor(labels)
train, test = TensorDataset(images[360:], labels[360:]), (images[:360], labels[:360])


def make_network():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def fit(model, optimizer, loader, epochs):
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()


def accuracy(model):
    with torch.no_grad():
        return (model(test[0]).argmax(1) == test[1]).float().mean().item()


model = make_network()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(train, batch_size=128, shuffle=True)
fit(model, optimizer, loader, epochs=20)
print(f"ordinary training: {accuracy(model):.1%} on held-out images")

# %% [markdown]
# ## The three lines
#
# `PrivacyEngine` has the interface of Opacus. It takes the model, the optimizer and the loader, and returns private
# ones. We say what we want to spend, and it computes how much noise that needs. The training loop `fit` stays as it
# is.

# %%
from spectral_dp import PrivacyEngine

model = make_network()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
loader = DataLoader(train, batch_size=128, shuffle=True)

engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=loader,
    target_epsilon=3.0, target_delta=1e-4, epochs=20, max_grad_norm=0.5,
)  # fmt: skip
fit(model, optimizer, loader, epochs=20)
print(f"private training: {accuracy(model):.1%} on held-out images")
print(f"epsilon spent: {engine.get_epsilon(delta=1e-4):.2f}, with noise multiplier {optimizer.noise_multiplier:.2f}")

# %% [markdown]
# Privacy costs accuracy, and it costs more on so few records. The noise is that of a cryptographic generator, so your
# figures differ a little from these.
#
# What changed behind the three lines:
#
# - **The loader** draws every record by a coin of its own, so batches have different sizes.
# - **The optimizer** clips the gradient of each record to a norm of 0.5, sums, and adds noise once.
# - **The engine** writes every step into a ledger, and `get_epsilon` adds the ledger up.
# - Before the first step, your loop was *rehearsed* on a few records: if one record could change the gradient of
#   another, you would have got an error that says where. See [Sharp edges](../sharp-edges.md).
#
# ## What does epsilon 3 mean?
#
# An attacker who knows all other records sees the model and guesses whether one person's record was used. The ledger
# says how often such a guess can be right at most, whatever the attack. Half of the time is a coin toss.

# %%
from spectral_dp.accounting.membership import guarantees_of, largest_guess_accuracy

ledger = engine.accountant.ledger
print(f"right at most {largest_guess_accuracy(guarantees_of(ledger)):.1%} of the time, after {ledger.steps} steps")

# %% [markdown]
# ## One more line: a filter
#
# The first layer reads pixels, and pixels lie on a grid. So its gradient has a spectrum, and most of what is in the
# high frequencies is noise. `input_layouts` says that 64 inputs are an 8 x 8 image, and `linear_ratio` drops a share
# of the frequencies. Epsilon stays the same, because dropping is decided before the data are read.

# %%
from spectral_dp import SpectralConfig

model = make_network()
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model, optimizer=optimizer, data_loader=DataLoader(train, batch_size=128),
    target_epsilon=3.0, target_delta=1e-4, epochs=20, max_grad_norm=0.5,
    spectral=SpectralConfig(linear_ratio=0.5, input_layouts={"1": (1, 8, 8)}),
)  # fmt: skip
fit(model, optimizer, loader, epochs=20)
print(f"with a filter: {accuracy(model):.1%}, epsilon {engine.get_epsilon(delta=1e-4):.2f}")

# %% [markdown]
# One run with one seed says nothing about whether the filter helps here. `spectral-dp compare` makes paired runs with
# several seeds and prints an interval; [the results](../../results/README.md) have those on larger data.
#
# Next: [choose epsilon, noise, batch size and epochs](choose_budget.md).
