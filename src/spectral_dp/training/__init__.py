"""Private training: the loop around the mechanism (Algorithm 4 of the paper).

- ``engine``: ``PrivacyEngine``, the front door, makes a model, an optimizer and a loader private.
- ``sampling``, ``coins`` and ``records``: Poisson batches.
- ``optimizer``: clip, sum, noise, filter, inverse, step, in that order. ``release_plan``: what that step releases.
- ``config``: what is released of each layer. ``run``: one private run, its ledger and what a ``checkpoint`` holds.
- ``criterion``, ``opacus_names`` and ``schedulers``: what a script of Opacus asks of the loss and of the optimizer.
- ``rehearsal``: a look at the user's own loop before anything is released.
"""
