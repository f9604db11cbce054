"""Choose epsilon, noise, batch size and epochs, before any data are read."""

# %% [markdown]
# # Choose epsilon, noise, batch size and epochs
#
# Four numbers decide what private training spends: the noise multiplier, the share of the records in a batch, the
# number of steps, and delta. All of this is arithmetic. It reads no data, so you can try as often as you like.
#
# On the command line:
#
# ```sh
# spectral-dp budget --samples 60000 --batch-size 1024 --epochs 30 --epsilon 2
# ```
#
# In Python, for a data set of 60,000 records:

# %%
from spectral_dp.accounting import calibrate_noise, epsilon

records, batch, epochs, delta = 60_000, 1024, 30, 1e-5
steps = epochs * (records // batch)
noise = calibrate_noise(2.0, delta, batch / records, steps)
print(f"{steps} steps at epsilon 2 need a noise multiplier of {noise:.3f}")
print(f"and spend epsilon {epsilon(noise, batch / records, steps, delta):.3f}")

# %% [markdown]
# ## Delta
#
# Delta is the probability that the promise is void. It should be well below one over the number of records: at delta
# = 1/n a mechanism that publishes one record at random would pass. We use 1e-5 here.
#
# ## What noise does an epsilon need?
#
# The curves bend: below epsilon 1 the noise grows quickly, above 3 little is won.

# %%
import numpy as np
from matplotlib import pyplot as plt

targets = np.array([0.25, 0.5, 1, 2, 3, 5, 8])
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for size in (256, 1024, 4096):
    count = epochs * (records // size)
    multipliers = [calibrate_noise(t, delta, size / records, count) for t in targets]
    axes.loglog(targets, multipliers, "o-", label=f"batch {size}, {count} steps")
axes.set(xlabel="epsilon", ylabel="noise multiplier", title="Noise for 30 epochs over 60,000 records")
axes.legend()
axes.grid(alpha=0.3, which="both")
plt.show()

# %% [markdown]
# ## Batch size: look at the noise per record
#
# A larger batch needs a larger multiplier, and still it wins: the sum has more records, and the noise is added once.
# What the optimizer feels is the noise *divided by the batch*. It falls until memory or patience ends.

# %%
sizes = [128, 256, 512, 1024, 2048, 4096, 8192]
felt = []
for size in sizes:
    count = epochs * (records // size)
    felt.append(calibrate_noise(2.0, delta, size / records, count) / size)
    print(f"batch {size:5}: noise multiplier {felt[-1] * size:6.3f}, per record {1000 * felt[-1]:.3f} thousandths")

# %% [markdown]
# Fewer, larger steps have less noise each; but a network needs enough steps to learn. With 60,000 records, batches of
# 1,000 to 2,000 and 10 to 40 epochs are a good place to begin. Use `max_physical_batch_size` if a batch does not fit
# into memory: it changes nothing about the privacy.
#
# ## Epochs
#
# More epochs at the same epsilon mean more noise in each step. The noise grows like the square root of the number of
# steps, once there are many.

# %%
figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
rounds = [1, 2, 5, 10, 20, 40, 80]
for target in (1.0, 2.0, 8.0):
    counts = [r * (records // batch) for r in rounds]
    multipliers = [calibrate_noise(target, delta, batch / records, c) for c in counts]
    axes.loglog(rounds, multipliers, "o-", label=f"epsilon {target:g}")
axes.set(xlabel="epochs", ylabel="noise multiplier", title="More epochs, more noise (batch 1024 of 60,000)")
axes.legend()
axes.grid(alpha=0.3, which="both")
plt.show()

# %% [markdown]
# ## What it does to accuracy
#
# That is a matter of measurement. These curves are from the results of this project: linear heads on frozen features
# of CIFAR-10, every point with its runs, read from `results/transfer-cpu/results.json`.

# %%
import json
from pathlib import Path

results = json.loads((Path(__file__).parents[2] / "results/transfer-cpu/results.json").read_text())
panel = results["panels"][0]
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for row in dict.fromkeys(cell["row"] for cell in panel["cells"]):
    cells = [cell for cell in panel["cells"] if cell["row"] == row and cell["mean_percent"] is not None]
    at = [float(cell["column"].rpartition("=")[2]) for cell in cells]
    axes.semilogx(at, [cell["mean_percent"] for cell in cells], "o-", label=row)
axes.set(xlabel="epsilon", ylabel="test accuracy %", title=panel["title"])
axes.legend(fontsize="small")
axes.grid(alpha=0.3)
plt.show()
print(f"drawn from {sum(len(cell['runs']) for cell in panel['cells'])} runs: {results['command']}")

# %% [markdown]
# With good features little is lost down to epsilon 1. From scratch the price is higher: see [the
# results](../../results/README.md). Choosing settings by looking at private results costs privacy, too: [Choose
# settings](../tuning.md) shows how to account for it.
#
# ## A plan that adds up
#
# 1. Fix delta below one over the number of records, and the epsilon that you are willing to defend.
# 2. Take the largest batch that leaves you a few hundred steps.
# 3. Let `make_private_with_epsilon` compute the noise from the epochs, or do it yourself as above.
# 4. Choose the learning rate on public data, or on a validation split.
