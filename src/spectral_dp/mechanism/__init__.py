"""The mechanism: transform, filter, clip, sum, noise, and back (Algorithm 1 of the paper, made sound).

From the ground up:

- ``transforms``: orthonormal transforms with real coordinates (``fourier``, ``dct``, ``haar``, ``hadamard``).
- ``gains`` and ``filters``: what each coordinate is multiplied by before the clip and after the noise.
- ``clipping``: each sample is bounded, and the clipped sum declares its own sensitivity.
- ``noise``: the only place where noise is drawn and added.
- ``perturbation``: Algorithm 1, which puts these together for tensors that hold one gradient per sample.
"""
