"""How a run begins, and goes on, on all ranks: with the same model, the same settings and the same ledger."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from spectral_dp._version import __version__
from spectral_dp.accounting import Ledger
from spectral_dp.training.checkpoint import seal
from spectral_dp.training.distributed.ranks import Ranks

#: The parameters of all ranks are compared before every release whose number is a multiple of this, and before releases
#: 1, 2, 4, 8, ..., because ranks that drift do so from the first step on. Their digest takes about 0.7 s per gigabyte.
COMPARED_EVERY = 100


def share_model(ranks: Ranks, module: nn.Module) -> None:
    """Gives every rank the parameters and buffers of rank 0.

    Raises:
        RanksError: If the models of two ranks have other names, shapes or types, or the software has other versions.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    facts: dict[str, object] = {"spectral-dp": __version__, "torch": torch.__version__}
    facts |= {name: (tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in state.items()}
    ranks.meet("make_private, with the model", facts)
    with torch.no_grad():
        ranks.take_over(list(state.values()), "the broadcast of the parameters")


def share_ledger(ranks: Ranks, ledger: Ledger, settings: Mapping[str, object]) -> None:
    """Makes the ledgers of all ranks one: they list the same releases, and will record the same ones.

    Raises:
        RanksError: If the settings of two ranks differ, or their ledgers already list different releases.
    """
    listed = ledger.head if ledger.steps else "nothing"
    ranks.meet("make_private, with the settings", {**settings, "ledger": listed})
    ledger.sign_as(ranks.of_first(lambda: ledger.signature, "the exchange of the ledger"))


def release_facts(
    parameters: Mapping[str, nn.Parameter], ledger: Ledger, steps: int, hyperparameters: object
) -> dict[str, object]:
    """Returns what must be equal on all ranks before a release.

    Args:
        parameters: The trained parameters, by name. Now and then they are compared, too: ranks that made the same
            releases have the same parameters, and if they do not, their optimizers or their arithmetic differ.
        ledger: The ledger, which lists the release already.
        steps: The number of steps that were made before.
        hyperparameters: The learning rate and the other numbers of the optimizer.
    """
    facts = {"step": steps, "ledger": ledger.head, "hyperparameters": hyperparameters}
    if steps % COMPARED_EVERY == 0 or steps.bit_count() == 1:
        facts["parameters"] = seal({name: parameter.detach() for name, parameter in parameters.items()})
    return facts


def stop_together(ranks: Ranks, has_limit: Callable[[], bool], must_stop: Callable[[], bool]) -> Callable[[], bool]:
    """Returns a function that tells every rank to stop if one of them must.

    Args:
        ranks: The ranks of the run.
        has_limit: Whether there is anything to stop at. If not, the ranks do not ask each other.
        must_stop: Whether this rank must stop.
    """
    return lambda: has_limit() and ranks.meet("the beginning of a step", flag=must_stop()).flag
