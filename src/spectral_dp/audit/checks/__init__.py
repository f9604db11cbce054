"""Checks: each takes a target and what was measured of it, and returns verdicts, the lines of the report.

* ``linear_map.py``: "linear map".
* ``neighbours.py``: "neighbours", "neighbours, not finite" and "batch size".
* ``noise_law.py``: "noise law".
* ``every_call.py``: "noise, every call".
* ``sampling.py``: "sampling" and "neighbours, over a run", from the same run.
* ``canaries.py``: "canaries, one step", "canaries, many steps" and "canaries, one run".

Where chance plays a part, the conclusion is drawn by ``statistics/``.
"""
