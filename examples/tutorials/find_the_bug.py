"""Audit a mechanism of your own, and find the bug in it."""

# %% [markdown]
# # Audit your own mechanism, and find the bug
#
# The suspect on this page is Algorithm 1 of the paper *Spectral-DP*, as it is printed: transform the clipped sum by a
# Fourier transform, add Gaussian noise to the coefficients, transform back. The paper claims an epsilon for it. Does
# it keep the claim?
#
# An audit wants a function: gradients of single records in, the released gradient out.

# %%
import torch

C, SIGMA, BATCH = 1.0, 1.1, 64


def clipped_sum(gradients):
    factors = (C / gradients.norm(dim=1, keepdim=True)).clamp(max=1).nan_to_num(0)
    return (gradients * factors).nan_to_num(0).sum(0)


def as_printed(gradients):
    """Algorithm 1, lines as printed: noise N(0, (sigma C)^2) on the coefficients of the spectrum."""
    spectrum = torch.fft.fft(clipped_sum(gradients), norm="ortho")
    spectrum = spectrum + SIGMA * C * torch.randn(len(spectrum))
    return torch.fft.ifft(spectrum, norm="ortho").real / BATCH


# %% [markdown]
# It looks right. It clips, it adds noise to every coefficient, and it divides by a constant. Training with it works
# well.
#
# ## The claim, and the audit
#
# `Claim` says what is promised. `run_audit` makes every check that applies to a function and collects the verdicts.
# The effort here is small, so that this page is quick; `audit.FAST` and `audit.FULL` are what you would use.

# %%
from spectral_dp import audit

claim = audit.Claim(noise_multiplier=SIGMA, max_grad_norm=C, expected_batch_size=BATCH, sample_rate=0.2, steps=5)
effort = audit.Effort(1, canary_blocks=4, per_block=4, scores=500, run_scores=20, steps=20, noise_steps=8, calls=40)
report = audit.run_audit(audit.FunctionTarget(as_printed, claim, dimension=16), effort=effort, seed=0)
for verdict in report.verdicts:
    print(f"{verdict.audit:22} {verdict.outcome}")

# %%
for verdict in report.violations:
    print(
        f"{verdict.audit}, {verdict.quantity}: {verdict.wanted} {verdict.claimed:.4g}, measured {verdict.measured:.4g}"
    )
    print(verdict.note)

# %% [markdown]
# The audit has found directions that leave without any noise. One exact check is enough to refute the claim. Checks
# that depend on chance may see nothing at so small an effort, which says nothing in favour of the claim. Which
# directions are they?
#
# ## Look at the noise
#
# We release zeros many times and look at the spectrum of what comes out. The coefficients are complex, and the noise
# that was added is real. A real signal has an even and an odd part, and the odd part lives in the imaginary parts.

# %%
from matplotlib import pyplot as plt

releases = torch.stack([as_printed(torch.zeros(1, 16)) for _ in range(2000)]) * BATCH
coefficients = torch.fft.rfft(releases, norm="ortho")
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
axes.bar(torch.arange(9).numpy() - 0.2, coefficients.real.std(0).numpy(), 0.4, label="real parts")
axes.bar(torch.arange(9).numpy() + 0.2, coefficients.imag.std(0).numpy(), 0.4, label="imaginary parts")
axes.set(xlabel="frequency", ylabel="deviation of the noise", title="Noise of Algorithm 1 as printed")
axes.legend()
plt.show()

# %% [markdown]
# The imaginary parts are bare. A record whose gradient is odd is released exactly, whatever sigma is:

# %%
odd = torch.sin(2 * torch.pi * torch.arange(16) / 16)
released = as_printed(odd[None] / odd.norm()) * BATCH
odd_part = (released - released.flip(0).roll(1)) / 2
print(f"the largest error in the odd part: {(odd_part - odd / odd.norm()).abs().max():.1e}")

# %% [markdown]
# ## The repair
#
# Noise must reach every *real* coordinate. The simplest way is to draw real white noise for the signal and transform
# it along: an orthonormal transform of white noise is white noise with the right symmetry.


# %%
def repaired(gradients):
    total = clipped_sum(gradients)
    noisy = total + SIGMA * C * torch.randn(len(total))  # in any orthonormal real coordinates it is the same
    return noisy / BATCH


report = audit.run_audit(audit.FunctionTarget(repaired, claim, dimension=16), effort=effort, seed=0)
print("no violation found" if report.ok else report.violations)
exact = next(verdict for verdict in report.verdicts if verdict.audit == "linear map")
print(f"{exact.audit}, {exact.quantity}: {exact.wanted} {exact.claimed:.4g}, measured {exact.measured:.4g}")

# %% [markdown]
# A passed audit is no proof, but a failed one is a refutation. `spectral-dp audit --target mine.py:release` does the
# same from the command line, and `spectral-dp audit` without a target audits the training step of this library.
# [Audit a mechanism](../audit.md) explains each check and what it cannot see.
