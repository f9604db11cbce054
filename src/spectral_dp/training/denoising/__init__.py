"""Optimizers that know the noise on the released gradient: post-processing, which costs no privacy.

- ``noise_aware``: how the private optimizer tells an optimizer the noise, and what the wrappers here have in common.
- ``adam_bc``: Adam without the noise in its second moment (DP-AdamBC).
- ``low_pass``: a low-pass filter over time before any optimizer (DOPPLER).
- ``kalman``: a Kalman filter before any optimizer, with gradients at a point ahead (DiSK).

Formal guarantee. All of them compute with released gradients, the noise level and settings, and with nothing else. So
whatever they do is post-processing of what the ledger lists, and epsilon is unchanged. (Weights at which the next
gradient is taken may depend on everything that was released before.)
"""
