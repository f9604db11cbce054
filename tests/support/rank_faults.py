"""Runs in which a rank is lost in the middle of a step, and what the others then know (see ``processes.py``)."""

import os
import signal
import time
from pathlib import Path
from unittest import mock

from torch import distributed as dist
from torch import nn

from spectral_dp import PrivacyEngine
from spectral_dp.training.distributed import joining
from spectral_dp.training.distributed.ranks import Ranks
from tests.support.private_runs import setup, weights

#: The release at which the rank is lost: the runs make a checkpoint after every one.
LOST_AT = 3


def unlucky_run(path, when, slow_for=4.5):
    """Trains, until rank 1 is lost in a step; the others tell what was said, and what they hold then."""
    engine, model, optimizer, loader = setup(engine=PrivacyEngine(), rehearsal=False)
    if Path(path).exists():
        engine.load_checkpoint(path=path, module=model)
    released, plain = weights(model), Ranks.added

    def added(self, tensors, ranks):
        is_now = optimizer.steps == LOST_AT and self.rank == 1
        if is_now and when == "before the all-reduce":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_now and when == "slow":
            time.sleep(slow_for)
        totals = plain(self, tensors, ranks)
        if is_now and when == "after the all-reduce":
            os.kill(os.getpid(), signal.SIGKILL)
        return totals

    began = time.monotonic()
    with mock.patch.object(Ranks, "added", added):
        try:
            while optimizer.steps < 2 * LOST_AT:
                for x, y in loader:
                    began = time.monotonic()
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    if optimizer.steps == LOST_AT and dist.get_rank() == 1 and when == "in the loop":
                        os.kill(os.getpid(), signal.SIGKILL)
                    optimizer.step()
                    released = weights(model)
                    engine.save_checkpoint(path=path, module=model)
                    if optimizer.steps == 2 * LOST_AT:
                        break
        except RuntimeError as error:
            return {
                "words": str(error),
                "seconds": time.monotonic() - began,
                "released": optimizer.steps,
                "listed": engine.accountant.ledger.steps,
                "unchanged": bool((weights(model) == released).all()),
            }
    return {"words": "", "released": optimizer.steps, "listed": engine.accountant.ledger.steps}


def other_version():
    """Rank 1 has another version of this package."""
    version = "0.0.0" if dist.get_rank() == 1 else joining.__version__
    with mock.patch.object(joining, "__version__", version):
        setup(engine=PrivacyEngine())
