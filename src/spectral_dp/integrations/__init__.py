"""Private training inside of other people's training loops.

- ``transformers``: ``PrivateTrainer``, a ``Trainer`` of Hugging Face; needs the extra ``spectral-dp[transformers]``.
- ``lightning``: ``DifferentialPrivacy``, a callback of Lightning; needs the extra ``spectral-dp[lightning]``.
- ``logical_steps``: what both have in common. A trainer counts batches, schedules learning rates and saves checkpoints
  by them; so it is given one batch for each *logical* step, and the further physical batches of a step, and those of
  the rehearsal, are trained on where it does not count.

Each module can be imported without the package that it integrates with: only using it needs the package.
"""
