"""The mechanism: transform, filter, clip, sum, add noise, and transform back (a private form of Algorithm 1).

Each module uses only those listed before it:

- ``transforms``: orthonormal transforms with real coordinates (``fourier``, ``dct``, ``haar``, ``hadamard``).
- ``public_basis``: a transform whose basis is public vectors, with eigenvalues in place of frequencies.
- ``gains`` and ``filters``: the factors by which each coordinate is multiplied before the clip and after the noise;
  ``eigenvalue_filter`` has those of a public basis.
- ``clipping``: bounds the contribution of each sample. The clipped sum declares its own sensitivity.
- ``noise``: the sources of Gaussian noise.
- ``perturbation``: Algorithm 1, which puts these together for tensors that hold one gradient per sample. Its function
  ``add_noise`` is the only place where noise is added.
- ``release``: one release of a clipped sum over a whole data set, charged to a ledger before it is noised.
"""
