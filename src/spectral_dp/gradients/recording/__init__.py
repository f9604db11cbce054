"""Recording: what the layers of an ordinary model saw and sent in a backward pass, and what they left behind.

- ``recorder``: hooks that keep each watched layer's input and output gradient.
- ``side_outputs``: tensors that leave a layer by another way than its output.
- ``fingerprint`` and ``state``: whether a forward pass changed anything that a later sample could see.
"""
