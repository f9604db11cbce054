import os

import pytest

from spectral_dp._processes import this_process


def seen_in_a_fork(see):
    """What a function returns in a forked process, as a text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.write(write, repr(see()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_a_process_stays_itself():
    assert this_process() == this_process()


def test_a_fork_is_another_process_and_its_fork_a_third_one():
    child = seen_in_a_fork(this_process)
    grandchild = seen_in_a_fork(lambda: eval(seen_in_a_fork(this_process)))
    assert len({repr(this_process()), child, grandchild}) == 3


@pytest.mark.parametrize(("see", "differ"), [(this_process, True), (lambda: (os.getpid(),), False)])
def test_a_child_with_the_number_of_its_parent_is_another_process(monkeypatch, see, differ):
    """As in a container of its own, where the first process has the number 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    seen = {repr(see()), seen_in_a_fork(see), seen_in_a_fork(lambda: eval(seen_in_a_fork(see)))}
    assert len(seen) == (3 if differ else 1)


def test_a_fork_that_python_does_not_know_of_is_another_process(monkeypatch):
    before = this_process()
    monkeypatch.setattr(os, "getpid", lambda: before[0] + 1)
    assert this_process() != before
