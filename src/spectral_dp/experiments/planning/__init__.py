"""A plan for a private run from public facts: how many records, which budget, which network, how much compute.

- ``batch_sizes``: noise and effective signal-to-noise ratio as functions of the batch size, at constant compute.
- ``evidence``: the results that were committed, and the paper's guidelines checked against them.
- ``recommendation``: what follows, with the reasons.
"""
