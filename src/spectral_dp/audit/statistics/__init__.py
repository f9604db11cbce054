"""Statistics: the confidence bounds and tests that the checks draw their conclusions with. They know of no target.

* ``bounds.py``: what canary scores prove about one Gaussian release.
* ``sampled.py``: what they prove about many Poisson-sampled releases.
* ``one_run.py``: what the canaries of a single run prove, without any assumption about noise and sampling.
* ``noise_law.py``: whether the noise of a few releases is what it is claimed to be.
* ``call_law.py``: the same for many releases, each judged by itself.
* ``coverage.py``: how rare a release without noise may be and still be found.
"""
