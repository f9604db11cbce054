"""Recording: what the layers of an ordinary model saw and sent in a backward pass, and what they left behind.

- ``recorder``: hooks that keep each watched layer's input and output gradient.
- ``call`` and ``anchor``: what a layer was called with, and tensors that the backward pass reaches.
- ``passes``, ``shared``, ``samples`` and ``trial``: whose a row is, and an entry for each sample in what they share.
- ``side_outputs``: tensors that leave a layer by another way than its output.
- ``fingerprint`` and ``state``: whether a forward pass changed anything that a later sample could see.
"""
