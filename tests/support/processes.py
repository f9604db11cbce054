"""Real processes for tests: started once, then given one function after another to run as the ranks of a group."""

import datetime
import importlib
import os
import tempfile
import traceback
from pathlib import Path

import torch
from torch import distributed as dist

from tests.support.killable_runs import started

_NO_GROUP = "NoGroup"  # what a rank says whose group could not be made
TIMEOUT = 60.0  # seconds that a function may take, beyond the timeout of its group


class Failed(Exception):
    """An error of a rank: the name of its class, and its message."""

    def __init__(self, kind, message, trace):
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


class Lost(Exception):
    """A rank that ended without a word."""


class Processes:
    """Processes that wait for functions. Each call of :meth:`results` is a new process group of the first of them."""

    def __init__(self):
        self._workers, self._lost = [], []

    def results(self, size, function, *args, timeout=20.0):
        """Runs ``module:name`` on so many ranks, and returns what it returned or raised on each of them.

        Ranks that found no group on a busy machine number their later groups differently, and would never meet again:
        others take their places, once.
        """
        found = self._try(size, function, *args, timeout=timeout)
        if any(isinstance(result, Failed) and result.kind == _NO_GROUP for result in found):
            self.stop()
            self._workers.clear()
            found = self._try(size, function, *args, timeout=timeout)
        return found

    def _try(self, size, function, *args, timeout):
        self._start(size)
        with tempfile.TemporaryDirectory() as directory:
            for rank, (_, pipe) in enumerate(self._workers[:size]):
                pipe.send((function, args, rank, size, str(Path(directory, "store")), timeout))
            found = [self._receive(rank, TIMEOUT + timeout) for rank in range(size)]
        for rank in sorted(self._lost, reverse=True):  # the next call starts others in their places
            del self._workers[rank]
        self._lost.clear()
        return found

    def run(self, size, function, *args, timeout=20.0):
        """Runs a function on so many ranks, and returns what it returned. What any of them raised is raised."""
        found = self.results(size, function, *args, timeout=timeout)
        for result in found:
            if isinstance(result, Exception):
                raise result
        return found

    def _start(self, size):
        while len(self._workers) < size:
            self._workers.append(started(_serve))

    def _receive(self, rank, patience):
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(patience):
                result, failure = pipe.recv()
                return Failed(*failure) if failure else result
            process.kill()
        except EOFError:
            pass
        process.join()
        pipe.close()
        self._lost.append(rank)
        return Lost(f"rank {rank} ended with code {process.exitcode}")

    def stop(self):
        for _, pipe in self._workers:
            pipe.send(None)
        for process, _ in self._workers:
            process.join(5)
            process.kill()


def _serve(pipe):
    torch.set_num_threads(1)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if asked is None:
            return
        function, args, rank, size, store, timeout = asked
        result = failure = None
        has_group = False
        module, _, name = function.partition(":")
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        torch.manual_seed(rank)  # ranks begin with different parameters, as careless scripts do
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, size),
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(seconds=timeout),
            )
            has_group = True
            result = getattr(importlib.import_module(module), name)(*args)
        except Exception as error:
            kind = type(error).__name__ if has_group else _NO_GROUP
            failure = kind, str(error), traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send((result, failure))
