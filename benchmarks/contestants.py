"""The training steps that are timed: plain PyTorch, Opacus in its modes, and ours, on the same models and batches.

Each contestant is a function from a workload to a *step*: a callable that trains on one batch of the given size.
Private ones are driven without their samplers, whose batches vary in size; sampling is timed apart. A step ends by
clearing gradients, so that a contestant that waits for its turn holds no per-sample gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from workloads import Workload

from spectral_dp import PrivacyEngine, Relation, SpectralConfig
from spectral_dp.mechanism.clipping import ClippingName

Step = Callable[[], None]
Contestant = Callable[[Workload], Step]
SIGMA, CLIP, RATE = 1.0, 1.0, 0.1


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Any, batches: Iterable[Any]) -> Step:
    """Trains on every batch there is: one."""

    def step() -> None:
        for x, y in batches:
            loss_of(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            x.grad = None

    return step


def plain(*, dense: bool = True) -> Contestant:
    """Ordinary training, of the dense model unless told otherwise."""

    def make(work: Workload) -> Step:
        model = work.build(dense=dense)
        return training_step(model, sgd(model), F.cross_entropy, [work.batch()])

    return make


def ours(spectral: Callable[[nn.Module], SpectralConfig], clipping: ClippingName = "flat") -> Contestant:
    """Ours, through its engine with ledger and checks, and with secure noise."""

    def make(work: Workload) -> Step:
        model = work.build()
        model, optimizer, loader = PrivacyEngine(relation=Relation.REPLACE_ONE).make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=one_batch(work),
            noise_multiplier=SIGMA,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            sample_rate=1.0,
            rehearsal=False,  # the loader has only one batch to give
            clipping=clipping,
            spectral=spectral(model),
        )
        return training_step(model, optimizer, F.cross_entropy, loader)

    return make


def one_batch(work: Workload) -> DataLoader[Any]:
    """A loader for an engine, which has always the same batch at hand."""
    batch = work.batch()
    return DataLoader(range(work.batch_size), batch_size=work.batch_size, collate_fn=lambda _: batch)  # type: ignore[arg-type]


def opacus(mode: str, *, dense: bool = True) -> Contestant:
    """DP-SGD by Opacus in one of its modes, with noise from torch's generator, which is the quicker of its two.

    It has no rule for block-circulant layers: those it differentiates by functorch, whatever the mode.
    """

    def make(work: Workload) -> Step:
        import opacus

        warnings.simplefilter("ignore")
        model, criterion = work.build(dense=dense), nn.CrossEntropyLoss()
        if opacus.validators.ModuleValidator.validate(model):  # attention and recurrent layers have forms of its own
            model = opacus.validators.ModuleValidator.fix(model)
        made: Any = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=one_batch(work),
            noise_multiplier=SIGMA,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            grad_sample_mode=mode,
            **({"criterion": criterion} if mode == "ghost" else {}),
        )
        return training_step(made[0], made[1], made[2] if mode == "ghost" else criterion, [work.batch()])

    return make


def channels_last(contestant: Contestant) -> Contestant:
    """The same on images with channels last in memory, as ``spectral-dp train`` gives them to networks on CPUs."""
    return lambda work: contestant(replace(work, channels_last=True))


def half(model: nn.Module) -> SpectralConfig:
    """Half of the coefficients of every layer that has a spectrum."""
    layouts = {
        name: shape
        for name, shape in getattr(model, "input_layouts", {}).items()
        if isinstance(model.get_submodule(name), nn.Linear)
    }
    return SpectralConfig(conv_ratio=0.5, linear_ratio=0.5, input_layouts=layouts)


def nothing(model: nn.Module) -> SpectralConfig:
    return SpectralConfig.dpsgd()


CONTESTANTS: dict[str, Contestant] = {
    "plain": plain(),
    "plain, blocks": plain(dense=False),
    "spectral": ours(half),
    "spectral, per layer": ours(half, "per_layer"),
    "dpsgd": ours(nothing),
    "dpsgd, per layer": ours(nothing, "per_layer"),
    "opacus hooks": opacus("hooks"),
    "opacus ghost": opacus("ghost"),
    "opacus functorch": opacus("functorch"),
    "opacus hooks, blocks": opacus("hooks", dense=False),
    "opacus ghost, blocks": opacus("ghost", dense=False),
    "plain, channels last": channels_last(plain()),
    "spectral, channels last": channels_last(ours(half)),
    "dpsgd, channels last": channels_last(ours(nothing)),
    "opacus hooks, channels last": channels_last(opacus("hooks")),
    "opacus ghost, channels last": channels_last(opacus("ghost")),
}


def contestants_for(work: Workload) -> list[str]:
    """The names of those that make a difference there.

    Without blocks, the forms in blocks are the dense ones. Models of sequences have no spectrum to filter. The order
    of channels in memory matters to convolutions.
    """
    names = [name for name in CONTESTANTS if work.block_size is not None or not name.endswith(", blocks")]
    names = [name for name in names if work.convolves or not name.endswith(", channels last")]
    return [name for name in names if not (work.is_of_sequences and name.startswith("spectral"))]
