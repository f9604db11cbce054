"""Our own training as a target: everything that ``PrivacyEngine.make_private`` returns, unchanged."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from spectral_dp.audit.targets import group
from spectral_dp.audit.targets.excitations import LayerProbe
from spectral_dp.audit.targets.model import ModelTarget
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.samples import Batch
from spectral_dp.audit.targets.target import Claim, Output, Record, SampledRun
from spectral_dp.gradients.rules.conv_signal import SignalConvRule
from spectral_dp.mechanism.clipping import NonFiniteWarning
from spectral_dp.mechanism.eigenvalue_filter import EigenvalueFilter
from spectral_dp.mechanism.filters import IdentityFilter, LowPassFilter, PaperBandFilter, ShapedFilter
from spectral_dp.training.config import SpectralConfig
from spectral_dp.training.distributed.ranks import current_ranks
from spectral_dp.training.engine import PrivacyEngine
from spectral_dp.training.optimizer import PrivateOptimizer
from spectral_dp.training.sampling import PoissonLoader

#: How many records a batch that the auditor chooses may hold, at least, and times the expected batch.
CAPACITY, TIMES_EXPECTED = 1 << 16, 4

#: Filters whose gains are the same at every step.
STEADY = (IdentityFilter, LowPassFilter, PaperBandFilter, ShapedFilter, EigenvalueFilter)


class SpectralTarget(ModelTarget):
    """The training step of :class:`~spectral_dp.PrivacyEngine`.

    If ``torch.distributed.init_process_group`` was called before, it is the step that all processes of the group make
    together. All of them make the target and its audit, with the same arguments. Model and samples are those of rank 0.

    Args:
        model: The model. A copy of it is audited.
        claim: The claim that is made of its training.
        input_shape: The shape of one sample, which is then random numbers.
        batch: A few samples as the model is called with them, in place of random numbers: a tensor, a tuple of
            arguments or a dict of keyword arguments.
        hostile: Samples of your own that should be hard to bound, by name, each as a batch of one.
        spectral: The configuration that says what is released of each layer.
        max_physical_batch_size: Larger batches are split, as in training.
        seed: Seed of noise and batches. If None, they are the secure ones of a private run.
        name: The name of the target in reports.
        **options: Further arguments of ``PrivacyEngine.make_private`` (``clipping``, ``noise_allocation``).
    """

    def __init__(
        self,
        model: nn.Module,
        claim: Claim,
        *,
        input_shape: Sequence[int] | None = None,
        batch: Batch | None = None,
        hostile: Mapping[str, Batch] | None = None,
        spectral: SpectralConfig | None = None,
        max_physical_batch_size: int = 64,
        seed: int | None = None,
        name: str = "spectral_dp",
        **options: Any,
    ) -> None:
        self._ranks = ranks = current_ranks()
        if ranks is not None:
            self.processes = ranks.size
            model, name = group.model_of_first(ranks, model), f"{name}, {ranks.size} processes"
            claim, batch, hostile = ranks.of_first(lambda: (claim, batch, hostile), "the beginning of an audit")
        super().__init__(model, claim, input_shape=input_shape, batch=batch, hostile=hostile)
        self.name, self._seed, self._runs = name, seed, itertools.count()
        self._options = {"max_grad_norm": claim.max_grad_norm} | options
        self._options["spectral"] = None if spectral is None else self._with_sizes(spectral)
        self._options["max_physical_batch_size"] = max_physical_batch_size
        expected = claim.expected_batch_size
        self._chosen = self._train(max(CAPACITY, TIMES_EXPECTED * math.ceil(expected)), expected)
        self._own_noise = self._chosen.optimizer.noise
        self._filters = copy.deepcopy(self._chosen.optimizer.gradients.filter_state())
        self.outputs = self._outputs()

    def _with_sizes(self, spectral: SpectralConfig) -> SpectralConfig:
        """Tells convolutions with signal support the size of their input, which they would learn from the first one."""
        sizes = {
            name: tuple(self._seen[name].x.shape)
            for name, module in self._template.named_modules()
            if isinstance(module, nn.Conv1d | nn.Conv2d) and name in self._seen
        }
        layers = {
            name: replace(layer, input_layout=layer.input_layout or sizes.get(name))
            if layer.support == "signal"
            else layer
            for name, layer in spectral.layers.items()
        }
        if spectral.support != "signal":
            sizes = {}
        return replace(spectral, layers=layers, input_layouts={**sizes, **spectral.input_layouts})

    def release(self, records: Sequence[Record], noise: Script | None = None) -> Tensor:
        """Makes one logical step on these records. Filters that learn forget it."""
        training, ranks = self._chosen, self._ranks
        served = noise if noise is None or ranks is None else group.ScriptShare(noise, ranks)
        training.optimizer.noise = self._own_noise if served is None else served
        training.loader.coins = group.chosen_coins(ranks, len(records))  # splitting and loading are the loader's own
        released = next(self._steps(training, records))
        if noise is not None and ranks is not None:
            group.count_draws(ranks, noise)
        training.optimizer.gradients.load_filter_state(self._filters)
        training.optimizer.resume(0)
        return released

    def run(self, records: Sequence[Record], steps: int, *, noise_off: bool = False) -> SampledRun:
        """Trains on Poisson batches of the private loader."""
        training = self._train(len(records), self.claim.sample_rate * len(records))
        if noise_off:
            training.optimizer.noise = Script()
        epochs = (self._steps(training, records) for _ in itertools.count())
        releases = itertools.chain.from_iterable(epochs)
        return SampledRun(training.loader.sample_rate, itertools.islice(releases, steps))

    def _steps(self, training: _Training, records: Sequence[Record]) -> Iterator[Tensor]:
        """Makes an epoch, and yields what each logical step released."""
        optimizer, loader, modules = training
        for (indices,) in loader:
            optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NonFiniteWarning)  # hostile records are meant to be so
                self._backward(modules, [records[i] for i in indices.tolist()])
                optimizer.step()
            assert loader.current is not None
            if loader.current.is_last:
                gradients = [parameter.grad for parameter in self._released(optimizer)]
                flat = torch.cat([g.detach().flatten().double() for g in gradients if g is not None])
                if self._ranks is not None:
                    group.require_same_release(self._ranks, flat)
                yield flat * optimizer.expected_batch_size

    def _released(self, optimizer: PrivateOptimizer) -> list[nn.Parameter]:
        """Returns the parameters in the order in which a step releases them."""
        return [optimizer.gradients.named_parameters[output.name] for output in self.outputs]

    def _train(self, samples: int, batch_size: float) -> _Training:
        model = copy.deepcopy(self._template)
        seed = None if self._seed is None else self._seed + next(self._runs)  # every run has noise of its own
        engine = PrivacyEngine(relation=self.claim.relation, seed=seed, reproducibility_over_privacy=seed is not None)
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=PoissonLoader(TensorDataset(torch.arange(samples)), batch_size=batch_size),
            noise_multiplier=self.claim.noise_multiplier,
            rehearsal=False,  # the records are the auditor's, and made to be hostile
            **self._options,
        )
        assert isinstance(loader, PoissonLoader)
        return _Training(optimizer, loader, dict(model.named_modules()))

    def _outputs(self) -> list[Output]:
        gradients = self._chosen.optimizer.gradients
        blocks = gradients.trained_blocks
        moving = {rule for layers, _ in blocks for _, rule in layers if not isinstance(rule.config.filter, STEADY)}
        shared = bool(moving) and self._options.get("noise_allocation") == "optimal"  # by how much each layer keeps
        outputs = []
        for block in self._chosen.optimizer.release_plan().blocks:
            # Of the claim, not the plan's own: the auditor does not take the target's word for its sensitivity.
            noise_std = self.claim.noise_multiplier * self.claim.moves * block.max_norm
            for name in (planned.name for planned in block.parameters):
                parameter = gradients.named_parameters[name]
                rule, own_name = gradients.owner(parameter)
                gains = rule.gains if own_name == "weight" else None
                shaped = gains is not None and (gains.kept_post is not None or isinstance(rule, SignalConvRule))
                is_steady = not shared and not (own_name == "weight" and rule in moving)
                outputs.append(Output(name, tuple(parameter.shape), None if shaped else noise_std, is_steady))
        return outputs

    @cached_property
    def _probes(self) -> list[LayerProbe]:
        offsets, probes = self._offsets(self._released(self._chosen.optimizer)), []
        for layers, _ in self._chosen.optimizer.gradients.trained_blocks:
            name, rule = layers[0]  # layers that share a parameter release it once
            if name not in self._seen:  # the model does not use it: it is released as noise alone
                continue
            own = {n: offsets[p] for n, p in rule.parameters().items() if p in offsets}
            transform = rule.transform if rule.gains is not None else None
            layout, signal = rule.config.input_layout, isinstance(rule, SignalConvRule)
            seen = self._seen[name]
            probes.append(LayerProbe(name, rule.module, seen, self._samples, own, transform, layout, signal))
        return probes

    @property
    def _trained(self) -> list[str]:
        return [layers[0].name for layers, _ in self._chosen.optimizer.gradients.trained_blocks]

    @property
    def largest_gain(self) -> float:
        """The largest post-gain of a filter."""
        rules = [rule for block in self._chosen.optimizer.gradients.blocks for _, rule in block]
        posts = [rule.gains.kept_post for rule in rules if rule.gains is not None]
        return max([1.0, *(float(post.max()) for post in posts if post is not None)])


class _Training(NamedTuple):
    """What ``make_private`` returned."""

    optimizer: PrivateOptimizer
    loader: PoissonLoader
    modules: dict[str, nn.Module]
