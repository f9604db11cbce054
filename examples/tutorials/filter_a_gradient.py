"""See what a filter does to the gradient of a layer."""

# %% [markdown]
# # What a filter does to a gradient
#
# Private training adds the same amount of noise to every number of a gradient. A signal is not spread so evenly:
# where a layer reads an image, most of its gradient is in few low frequencies. A filter drops the rest, together with
# its noise. This page shows it on one layer, with pictures.
#
# ## A layer's gradient, record by record
#
# The layer reads 8 x 8 digits. The gradient of a dense layer is the outer product of what arrives at its output and
# its input, so each of its 32 rows is a small image.

# %%
import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
for _ in range(20):  # a little ordinary training, so that the gradient is that of a network at work
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad
            p.grad = None

batch = slice(0, 256)
hidden = model[0](images[batch]).tanh().detach().requires_grad_()
nn.functional.cross_entropy(model[2](hidden), labels[batch], reduction="sum").backward()
arriving = hidden.grad * (1 - hidden.detach() ** 2)  # the gradient at the output of the first layer
gradients = torch.einsum("bo,bi->boi", arriving, images[batch])  # (records, outputs, inputs)
print(f"one gradient for each record: {tuple(gradients.shape)}")

# %% [markdown]
# ## Clip, sum, add noise
#
# Each record's gradient is clipped to norm 1. Then the sum gets Gaussian noise with a deviation of 2 on every number.

# %%
norms = gradients.flatten(1).norm(dim=1)
clipped = gradients / norms.clamp(min=1.0)[:, None, None]
total = clipped.sum(0)
noise = 2.0 * torch.randn(total.shape)
print(f"{(norms > 1).float().mean():.0%} of the records were clipped")
print(f"length of the sum: {total.norm():.1f}; length of the noise: {noise.norm():.1f}")

# %% [markdown]
# ## The spectrum
#
# `get_transform("dct")` gives orthonormal cosine coordinates of the 8 x 8 inputs: no length changes, and the noise
# stays as it is. But the signal moves into a corner.

# %%
from spectral_dp import LowPassFilter, get_transform

dct = get_transform("dct")


def spectrum(rows):
    return dct.forward(rows.reshape(-1, 8, 8), (1, 2))


signal, noisy = spectrum(total), spectrum(total + noise)
gains = LowPassFilter(0.7).gains(dct, (8, 8))
kept = gains.post > 0

figure, axes = plt.subplots(1, 3, figsize=(9, 3.1), layout="constrained")
pictures = (signal.square().mean(0), spectrum(noise).square().mean(0), kept.float())
for ax, picture, title in zip(axes, pictures, ("power of the signal", "power of the noise", "kept band"), strict=True):
    scale = {"norm": "log"} if title != "kept band" else {"vmin": 0, "vmax": 1}
    figure.colorbar(ax.imshow(picture.numpy(), **scale), ax=ax, shrink=0.8)
    ax.set(title=title, xlabel="frequency across", ylabel="frequency down")
plt.show()

# %%
share = signal.square()[:, kept].sum() / signal.square().sum()
print(f"the band keeps {int(kept.sum())} of 64 coordinates and {share:.1%} of the signal's energy")

# %% [markdown]
# ## Before and after
#
# One row of the gradient as an image: the true clipped sum, the private one, and the private one with the filter.
# Both private ones have the same epsilon.

# %%
with_filter = dct.inverse(noisy * kept, (1, 2))
row = int(total.norm(dim=1).argmax())
figure, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained")
limit = float(total[row].abs().max())
shown = (total[row].reshape(8, 8), (total + noise)[row].reshape(8, 8), with_filter[row])
for ax, picture, title in zip(axes, shown, ("clipped sum", "with noise", "with noise, filtered"), strict=True):
    ax.imshow(picture.numpy(), cmap="RdBu", vmin=-limit, vmax=limit)
    ax.set(title=title, xticks=[], yticks=[])
plt.show()

# %%
plain = (noise.square().sum() / total.square().sum()).sqrt()
rest = ((with_filter.reshape(-1, 64) - total).square().sum() / total.square().sum()).sqrt()
print(f"error relative to the clipped sum: {plain:.2f} without the filter, {rest:.2f} with it")

# %% [markdown]
# ## Filter first, then clip
#
# The paper clips, adds noise, and then filters. Here the filter comes first: what is dropped anyway no longer uses up
# the clipping bound. The noise and the privacy are the same, and more of the signal is left.

# %%
low = dct.inverse(spectrum(gradients.reshape(-1, 64)) * kept, (1, 2)).reshape(gradients.shape)
after = (low / norms.clamp(min=1.0)[:, None, None]).sum(0)
first = (low / low.flatten(1).norm(dim=1).clamp(min=1.0)[:, None, None]).sum(0)
print(f"length of the kept sum: {after.norm():.2f} when clipped first, {first.norm():.2f} when filtered first")

# %% [markdown]
# In training you write `SpectralConfig(linear_ratio=0.7, input_layouts={"0": (1, 8, 8)})`, and the library does all
# of this without forming the gradients of single records. Whether it pays depends on the layer: on 3 x 3 kernels
# there is hardly a spectrum to filter. [How the paper's claims fare](../paper-claims.md) has the measurements.
