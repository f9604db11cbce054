"""Train one private model in several processes."""

# %% [markdown]
# # Several processes
#
# Several processes train one private model together: on the cores of a machine, or on several machines. Epsilon,
# batch size and learning rate are those of one process.
#
# ## The script
#
# `examples/distributed.py` is an ordinary script for `torchrun`. Two things tell it from a script for one process: it
# calls `init_process_group` before `make_private`, and it does *not* wrap the model. These are the lines:

# %%
from pathlib import Path

script = Path(__file__).parents[1] / "distributed.py"
lines = script.read_text().splitlines()
for line in lines:
    if "init_process_group" in line and "import" not in line and '"""' not in line and "torchrun" not in line:
        print(line.strip())
first = next(number for number, line in enumerate(lines) if "engine = PrivacyEngine()" in line)
print("\n".join(line[4:] for line in lines[first : first + 11]))

# %% [markdown]
# ## One process, and two
#
# We start it as `torchrun` would, first with one process and then with two. Each has the whole data set and draws
# from its own shard.

# %%
import os
import subprocess
import sys


def torchrun(processes):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), "--epochs", "2"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())


torchrun(1)
torchrun(2)

# %% [markdown]
# The same epsilon, and about the same accuracy: the noise is drawn afresh each time. Why is it the same epsilon?
#
# ## Noise in shares
#
# With R processes each adds Gaussian noise of variance `(sigma C)^2 / R` to its own sum *before* the sums are added.
# The total then carries exactly `(sigma C)^2`: not less, which would break the promise, and not more, which would
# waste accuracy. Drawn here for four processes:

# %%
import torch
from matplotlib import pyplot as plt

torch.manual_seed(0)
R, deviation = 4, 2.0
shares = deviation / R**0.5 * torch.randn(R, 20_000)
total = shares.sum(0)
grid = torch.linspace(-8, 8, 200)
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.hist(shares[0].numpy(), bins=80, density=True, alpha=0.5, label="share of one process")
axes.hist(total.numpy(), bins=80, density=True, alpha=0.5, label="what is released")
density = torch.exp(-(grid**2) / (2 * deviation**2)) / (deviation * (2 * torch.pi) ** 0.5)
axes.plot(grid.numpy(), density.numpy(), "k", label="claimed")
axes.legend()
plt.show()
print(f"deviation of the total: {total.std():.2f}, claimed {deviation}")

# %% [markdown]
# ## Who must be trusted
#
# Epsilon is for those who see the model. The processes see more: one that subtracts its own share from the total is
# left with less noise against the others. With few processes that matters:

# %%
from spectral_dp.accounting import calibrate_noise, epsilon

rate, steps, delta = 200 / 4000, 100, 1e-5
sigma = calibrate_noise(1.0, delta, rate, steps)
for processes in (2, 4, 16):
    left = sigma * (1 - 1 / processes) ** 0.5
    curious = epsilon(left, rate, steps, delta)
    print(f"{processes:2} processes: epsilon 1.00 for the world, {curious:.2f} for a curious process")

# %% [markdown]
# If a process is lost, the others end with an error that names it, and the step is not released. A run goes on from
# its checkpoint with as many processes as there are then. [Use several processes](../distributed.md) lists what is
# checked and what is refused; from the command line it is `spectral-dp train --processes 2`.
