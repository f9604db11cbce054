"""Which process this is: what is random or signed must differ between a process and one that was forked from it."""

from __future__ import annotations

import os

_forks = 0  # that led to this process, as far as Python knows


def this_process() -> tuple[int, int]:
    """Returns what no process has in common with those that it was forked from.

    The number of a process alone would not do: in a container of its own, a child has the number 1, as its parent may
    have, and numbers of processes that have ended are given again. The count of forks alone would not do either: a
    program that embeds Python can fork without telling it.
    """
    return os.getpid(), _forks


def _count_a_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_count_a_fork)
