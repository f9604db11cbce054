"""Private training: the loop around the mechanism (Algorithm 4 of the paper).

- ``engine``: ``PrivacyEngine``, the entry point. It makes a model, an optimizer and a data loader private.
- ``compatibility``: refuses models, optimizers, loaders and losses that cannot be trained privately.
- ``config``: ``SpectralConfig``, which says what is released of each layer.
- ``loaders``: chooses the loader of a run. ``sampling``, ``coins`` and ``records``: Poisson batches.
- ``optimizer``: the private step: clip, sum, add noise, filter, invert the transform, descend, in that order.
- ``release_plan``: what the next step will release. ``bookkeeping``: enters each release in the ledger.
- ``denoising``: optimizers that know the noise on the released gradient. ``noise_levels``: how much there is.
- ``run``: one private run and the contents of its checkpoint. ``checkpoint``: the file format.
- ``criterion``, ``opacus_names``, ``schedulers``: the loss, attributes and schedulers that Opacus scripts use.
- ``distributed``: several processes that train one model together.
- ``rehearsal``: tests the user's training loop before anything is released.
"""
