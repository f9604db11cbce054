"""A rehearsal of the training loop, before its first release: does it treat every record by itself?

* ``procedure.py``: which small batches are handed out, and what is concluded from them.
* ``choice.py``: which records these are.
* ``explanation.py``: the errors.
* ``observation.py``: what one of them showed, in a few numbers.
* ``trace.py``: what a record looked like at every module, to say where records meet.
* ``twins.py``: records that may change places without changing the random numbers of others.
* ``aside.py``: everything is as it was before.
"""

from spectral_dp.training.rehearsal.procedure import Rehearsal, RehearsalError

__all__ = ["Rehearsal", "RehearsalError"]
