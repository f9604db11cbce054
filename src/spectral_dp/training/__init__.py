"""Private training: the loop around the mechanism (Algorithm 4 of the paper).

- ``engine``: ``PrivacyEngine``, the front door, makes a model, an optimizer and a loader private.
- ``compatibility``: what it refuses. ``config``: what is released of each layer.
- ``loaders``: which loader a run draws from. ``sampling``, ``coins`` and ``records``: Poisson batches.
- ``optimizer``: clip, sum, noise, filter, inverse, step, in that order. ``release_plan``: what that step releases.
- ``bookkeeping``: enters it in the ledger. ``run``: one private run, and what a ``checkpoint`` of it holds.
- ``criterion``, ``opacus_names`` and ``schedulers``: what a script of Opacus asks of the loss and of the optimizer.
- ``rehearsal``: a look at the user's own loop before anything is released.
"""
