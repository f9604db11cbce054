"""Training runs in processes of their own, which a test kills without warning.

The processes are forked from one that has imported torch and the library and done nothing else, since every import
takes seconds.
"""

import multiprocessing

import torch
from torch import nn

from spectral_dp import models
from spectral_dp.experiments import trainer
from spectral_dp.experiments.run_directory import RunDirectory
from tests.support.private_runs import setup

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", __name__])


def started(run, *arguments):
    """Starts ``run(connection, *arguments)``; returns the process and the connection that gets what the run sends."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=run, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that reading ends with an error, not never, if the process has died
    return process, ours


def killed(process, connection):
    """Kills a process with SIGKILL and waits for its end."""
    process.kill()
    process.join()
    connection.close()


def finished(process, connection):
    """Waits for the last that a run sends, and for its end."""
    result = connection.recv()
    process.join()
    connection.close()
    assert process.exitcode == 0
    return result


def steps_with_checkpoints(connection, path, steps):
    """Resumes from a checkpoint if there is one, says that it is ready, and saves after every step."""
    torch.set_num_threads(1)
    engine, model, optimizer, loader = setup(max_physical_batch_size=16)
    if path.exists():
        engine.load_checkpoint(path=path, module=model)
    connection.send("ready")
    while optimizer.steps < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            engine.save_checkpoint(path=path, module=model)
            if optimizer.steps == steps:
                break
    connection.send({"epsilon": engine.get_epsilon(1e-3), "steps": engine.accountant.ledger.steps})


def training_run(connection, path, settings):
    """Makes the run of a directory, or goes on with it, and sends its epsilon."""
    torch.set_num_threads(1)
    models.register_model("tiny", lambda input_shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes)))
    trainer._tensorboard = trainer.draw_run = lambda directory: None
    connection.send(trainer.run(settings, RunDirectory(path), resume=True)["epsilon"])
