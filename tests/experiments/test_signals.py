"""Signals are handled otherwise for a while, and by the main thread only."""

import signal
import threading

import pytest

from spectral_dp.experiments.signals import handled_by


def test_the_handler_is_there_within_the_block_and_the_old_one_after_it_also_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), handled_by(signal.default_int_handler, signal.SIGTERM):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_nothing_happens_in_another_thread():
    """Python refuses to set handlers there: whoever trains in a thread must not fail for it."""
    failures, handlers = [], []

    def work():
        try:
            with handled_by(lambda *_: None, signal.SIGTERM):
                handlers.append(signal.getsignal(signal.SIGTERM))
        except ValueError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert handlers == [signal.getsignal(signal.SIGTERM)]
