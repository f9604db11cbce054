"""The search for good settings, in two ways that must not be confused.

- ``space``: which settings are searched, and the public list of candidates that they give.
- ``plan``: the candidates of an accounted search with their noise, and what the search spends.
- ``accounted``: how many trials are run is random, the winner alone is released, and its epsilon covers the choice.
- ``draw``: what was decided once and for all when an accounted search began. ``score``: the noisy score of a trial.
- ``release``: what an accounted search publishes.
- ``open_search``: a search that is not accounted for, on public data or with a statement that says so.
"""
