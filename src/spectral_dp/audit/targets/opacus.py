"""Opacus' training as a target: the control, which the same audits must let pass."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp.audit.targets.excitations import LayerProbe
from spectral_dp.audit.targets.model import ModelTarget
from spectral_dp.audit.targets.noise_control import Script, TorchNoise
from spectral_dp.audit.targets.samples import Batch
from spectral_dp.audit.targets.target import Claim, Output, Record, SampledRun


class OpacusTarget(ModelTarget):
    """The training step of Opacus' own engine, which is the control.

    Non-finite records are not bounded by Opacus (``0 * inf`` is NaN), and it does not claim to.
    """

    handles_non_finite = False
    _calls_every_layer = True

    def __init__(
        self,
        model: nn.Module,
        claim: Claim,
        *,
        input_shape: Sequence[int] | None = None,
        batch: Batch | None = None,
        hostile: Mapping[str, Batch] | None = None,
        max_physical_batch_size: int = 64,
        name: str = "opacus",
    ) -> None:
        super().__init__(model, claim, input_shape=input_shape, batch=batch, hostile=hostile)
        if claim.moves != 1:
            raise ValueError(f"Opacus protects neighbours under add_or_remove_one, not {claim.relation}")
        self.name, self._split = name, max_physical_batch_size
        self._module, self._optimizer, _ = self._private(int(claim.expected_batch_size), 1, poisson=False)
        names = {p: n.removeprefix("_module.") for n, p in self._module.named_parameters()}
        self.outputs = [Output(names[p], tuple(p.shape), claim.noise_std) for p in self._optimizer.params]

    def release(self, records: Sequence[Record], noise: Script | None = None) -> Tensor:
        """Makes one logical step on these records."""
        return self._step(self._module, self._optimizer, records, noise)

    def run(self, records: Sequence[Record], steps: int, *, noise_off: bool = False) -> SampledRun:
        """Trains on Poisson batches of Opacus' own loader."""
        batch = max(1, round(self.claim.sample_rate * len(records)))
        module, optimizer, loader = self._private(batch, len(records), poisson=True)
        batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)
        script = Script() if noise_off else None
        return SampledRun(
            float(loader.sample_rate),
            (self._step(module, optimizer, [records[i] for i in indices.tolist()], script) for (indices,) in batches),
        )

    def _step(self, module: nn.Module, optimizer: Any, records: Sequence[Record], noise: Script | None) -> Tensor:
        modules = dict(module._module.named_modules())  # type: ignore[union-attr]
        parts = math.ceil(len(records) / self._split) or 1
        for part in range(parts):  # as Opacus' BatchMemoryManager splits
            optimizer.zero_grad()
            optimizer.signal_skip_step(do_skip=part < parts - 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # hooks on layers that are called by themselves
                self._backward(modules, records[part * self._split : (part + 1) * self._split])
            with nullcontext() if noise is None else TorchNoise(noise):
                optimizer.step()
        return torch.cat([p.grad.detach().flatten() for p in optimizer.params]).double() * optimizer.expected_batch_size

    def _private(self, batch_size: int, samples: int, *, poisson: bool) -> tuple[nn.Module, Any, Any]:
        try:
            import opacus
        except ImportError as error:
            raise ValueError("auditing Opacus needs Opacus: pip install 'spectral-dp[baseline]'") from error
        model = copy.deepcopy(self._template)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return opacus.PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
                data_loader=DataLoader(TensorDataset(torch.arange(max(samples, batch_size))), batch_size=batch_size),
                noise_multiplier=self.claim.noise_multiplier,
                max_grad_norm=self.claim.max_grad_norm,
                poisson_sampling=poisson,
            )

    @cached_property
    def _probes(self) -> list[LayerProbe]:
        modules = dict(self._module._module.named_modules())  # type: ignore[union-attr]
        offsets = self._offsets(self._optimizer.params)
        return [
            LayerProbe(name, modules[name], self._seen[name], self._samples, _own(modules[name], offsets))
            for name in self._trained
            if name in self._seen
        ]

    @property
    def _trained(self) -> list[str]:
        offsets = self._offsets(self._optimizer.params)
        modules = self._module._module.named_modules()  # type: ignore[union-attr]
        return [name for name, module in modules if _own(module, offsets)]


def _own(module: nn.Module, offsets: Mapping[nn.Parameter, int]) -> dict[str, int]:
    """Where the parameters of a module itself begin in the release."""
    return {name: offsets[p] for name, p in module.named_parameters(recurse=False) if p in offsets}
