"""A rehearsal of the training loop before its first release: does the loop treat every record independently?

* ``procedure.py``: the small batches that the loop gets, and what follows from its gradients.
* ``choice.py``: chooses the records of these batches.
* ``observation.py``: describes the gradients of one batch by a few numbers.
* ``trace.py``: follows a record through the modules, to find where it first depends on others.
* ``twins.py``: finds records that can be exchanged without changing the random numbers of others.
* ``aside.py``: saves and restores the state of everything that a rehearsal changes.
* ``explanation.py``: the error messages.
"""

from spectral_dp.training.rehearsal.procedure import Rehearsal as Rehearsal
from spectral_dp.training.rehearsal.procedure import RehearsalError as RehearsalError
