"""Instruments: what the checks measure a target with. They use the interface of a target alone, and judge nothing.

* ``noise_map.py``: the noise of a release as an exact linear map, and what can be read off it.
* ``noise_search.py``: finds that map with few releases, whatever the size of the model.
* ``flock.py``: chooses canaries that can be in one batch without disturbing each other.
"""
