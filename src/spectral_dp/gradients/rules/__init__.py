"""One rule for each kind of layer: norms and clipped sums of its filtered per-sample gradients.

``rule`` says what a rule is, ``layer_config`` what is released of a layer, ``registry`` which rule a layer has.
Algorithm 2 of the paper stands in ``conv_signal``, Algorithm 3 in ``block_circulant``.
Layers without a rule use ``fallback``.
"""
