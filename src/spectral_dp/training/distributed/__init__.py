"""Data-parallel private training: several processes (*ranks*) of one ``torch.distributed`` group make one run.

Each rank clips and sums the samples of its own shard of the records and adds its share of the noise. One all-reduce
adds the sums of all ranks, and only the coordinates that filters keep are sent. The rest of the step is the same on
every rank, and so is the ledger.

* ``ranks.py``: the group, and the few collective operations that everything here uses.
* ``attendance.py``: who arrived at these operations, so that an error names the rank that did not.
* ``shard.py``: the records of a rank, and their coins.
* ``same_records.py``: all ranks list the same records in the same order.
* ``shares.py``: the noise of a rank, and the all-reduce of the noisy sums.
* ``joining.py``: how a run begins on all ranks: same settings, same parameters, same ledger.
"""
