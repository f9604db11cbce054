"""Several processes of one command: what each is told, whose words are shown, and how all of them end."""

import os
import signal
import sys
import threading
import time

import pytest

from spectral_dp.experiments import launch
from spectral_dp.experiments.launch import is_rank, run_ranks


def ranks(program, processes=3):
    """Runs Python code as ranks; ``rank`` and ``size`` are known to it."""
    head = "import os, sys, time; rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
    return run_ranks([sys.executable, "-S", "-c", head + program], processes)


def test_each_process_knows_its_place(tmp_path):
    program = f"""
names = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "OMP_NUM_THREADS")
open({str(tmp_path)!r} + f"/{{rank}}", "w").write(" ".join(os.environ[name] for name in names))
"""
    assert ranks(program) == 0
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [int(local) for _, _, local, _ in found] == [0, 1, 2]
    assert len({(address, port) for address, port, _, _ in found}) == 1


def test_only_the_first_rank_has_the_terminal(capfd):
    assert ranks("print('words of', rank); print('complaint of', rank, file=sys.stderr)") == 0
    out, err = capfd.readouterr()
    assert out == "words of 0\n"
    assert err == "complaint of 0\n"


def test_the_rank_that_fails_first_is_quoted_and_gives_the_exit_code(capfd):
    assert ranks("sys.exit('out of records') if rank == 2 else time.sleep(0.5) or sys.exit(3)") == 1
    assert "rank 2 failed first, and says:\nout of records" in capfd.readouterr().err


def test_a_rank_that_is_killed_is_named(capfd):
    assert ranks("rank == 1 and os.kill(os.getpid(), 9)") == 128 + 9
    assert "rank 1 failed first without a word" in capfd.readouterr().err


def test_if_all_fail_alike_the_words_of_the_first_do(capfd):
    assert ranks("print('bad settings', file=sys.stderr); sys.exit(2)") == 2
    assert capfd.readouterr().err == "bad settings\n"


def test_ranks_that_do_not_end_by_themselves_are_ended(monkeypatch):
    monkeypatch.setattr(launch, "GRACE", 0.3)
    began = time.monotonic()
    assert ranks("sys.exit(5) if rank == 1 else time.sleep(60)") == 5
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on(number):
    program = f"import signal; signal.signal({int(number)}, lambda *_: sys.exit(130)); time.sleep(30)"
    timer = threading.Timer(1.0, os.kill, (os.getpid(), number))
    timer.start()
    began = time.monotonic()
    assert ranks(program, 2) in (130, 128 + number)  # the latter if it came before the handler
    assert time.monotonic() - began < 20


def test_a_process_knows_whether_it_is_one_of_several():
    assert is_rank({"WORLD_SIZE": "2"})
    assert not is_rank({"WORLD_SIZE": "1"})
    assert not is_rank({})
