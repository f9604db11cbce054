"""Targets: what can be audited, all behind one interface.

* ``target.py``: the interface, and the claim that is made of a target.
* ``function.py``: any function of per-sample gradients, such as code of your own.
* ``model.py``: what models have in common. ``spectral.py`` is our own training step, ``opacus.py`` that of Opacus.
* ``excitations.py``: records that make a chosen gradient in a chosen layer of a model.
* ``noise_control.py``: takes the place of the noise and of the coins of a target.
"""
