"""Models as targets: chosen gradients through a library's real training step.

A record is a tuple of parts, each of which says what one sample puts into which layer: an
:class:`~.excitations.Excitation` calls the layer by itself, a :class:`~.excitations.Passage` goes through the model as
far as the layer, or through all of it. A batch of records is a batch of indices drawn by the library's own data loader.
Each layer that a record touches is called once, with a row for every sample of the batch (which the loss does not look
at where a sample does not touch it), and one backward pass follows. Recording, physical splits, clipping, noise,
filter, inverse and divisor are the library's.
"""

from __future__ import annotations

import copy
import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from spectral_dp.audit.targets.calls import arguments_at, first_output, trace, weighed, with_gains
from spectral_dp.audit.targets.excitations import Excitation, LayerProbe, Passage
from spectral_dp.audit.targets.samples import Batch, InputForm, Sample, scaled
from spectral_dp.audit.targets.target import BEYOND, LONG, SHORT, Block, Claim, Hostile, Record, Target


class ModelTarget(Target):
    """The training step of a model: what our library and Opacus have in common.

    Args:
        model: The model. A copy of it is audited, without its dropout.
        claim: The claim that is made of its training.
        input_shape: The shape of one sample, which is then random numbers.
        batch: A few samples as the model is called with them, in place of random numbers: a tensor, a tuple of
            arguments or a dict of keyword arguments. Samples are in the first dimension of every tensor.
        hostile: Samples of your own that should be hard to bound, by name, each as a batch of one: the longest, an
            empty one, one of nothing but padding. They are tried beside those that are made here.
    """

    #: Whether every layer must see every batch.
    _calls_every_layer = False

    def __init__(
        self,
        model: nn.Module,
        claim: Claim,
        *,
        input_shape: Sequence[int] | None = None,
        batch: Batch | None = None,
        hostile: Mapping[str, Batch] | None = None,
    ) -> None:
        if (input_shape is None) == (batch is None):
            raise ValueError("give either input_shape, the shape of one sample, or batch, a few samples")
        self.claim = claim
        self._template = copy.deepcopy(model)
        _switch_dropout_off(self._template)
        self._is_random = batch is None
        if batch is None:
            batch = torch.randn(1, *(input_shape or ()), generator=torch.Generator().manual_seed(0))
        self._form = InputForm(batch)
        self._samples = self._form.samples(batch)
        self._hostile = {name: self._one(name, given) for name, given in (hostile or {}).items()}
        self._seen = trace(self._template, self._form, [*self._samples, *self._hostile.values()])
        if "" not in self._seen or self._seen[""].output_axis is None:
            raise ValueError("the model must return a tensor of real numbers first, with an entry for each sample")
        self._check_draws_nothing()

    def _check_draws_nothing(self) -> None:
        """Raises ``ValueError`` if the model gives the same samples different outputs because it draws at random.

        Two releases of the same records would differ, and the audits would accuse a sound step.
        """
        before = torch.get_rng_state()
        with torch.no_grad():
            outputs = [first_output(self._form.call(self._template, self._samples)) for _ in range(2)]
        one, two = (output for output in outputs if output is not None)
        has_drawn = not torch.equal(before, torch.get_rng_state())  # what differs without is a state, to be audited
        if has_drawn and not torch.equal(one.nan_to_num(), two.nan_to_num()):
            raise ValueError(
                "the model draws random numbers in its forward pass, so its releases cannot be compared: audit it with "
                "dropout, noise and the like switched off"
            )

    def _one(self, name: str, batch: Batch) -> Sample:
        samples = self._form.samples(batch)
        if len(samples) != 1:
            raise ValueError(f"hostile[{name!r}] holds {len(samples)} samples: give each as a batch of one (x[:1])")
        return samples[0]

    @property
    @abstractmethod
    def _probes(self) -> list[LayerProbe]:
        """The layers that are trained, in the order of the release."""

    def blocks(self, most: int, generator: torch.Generator) -> list[Block]:
        """Returns blocks of every trained layer."""
        return [block for probe in self._probes for block in probe.blocks(most, generator)]

    def null(self) -> Record:
        """Returns a sample that touches no layer."""
        return ()

    def together(self, records: Sequence[Record]) -> Record:
        """Returns one sample that touches every layer as the given ones do."""
        return tuple(excitation for record in records for excitation in record)

    def ordinary(self, count: int, generator: torch.Generator) -> list[Record]:
        """Returns samples through the whole model, as many with large losses as with small ones."""
        scales = [10.0 ** (k % 4 - 2) for k in range(count)]
        return [self._whole(self._sample(k, generator), scale, generator) for k, scale in enumerate(scales)]

    def mates(self, generator: torch.Generator) -> list[Record]:
        """Returns records that touch the last layer alone, so that no other is computed for them."""
        block, bound = self._last_block(generator), self.claim.max_grad_norm
        units, long = torch.eye(len(block.labels)), LONG * max(1.0, bound)
        lengths = (long, SHORT[0] * bound, long, SHORT[1] * bound)
        return [block.record(units[k % len(units)], length) for k, length in enumerate(lengths)]

    def hostile(self, generator: torch.Generator) -> list[Hostile]:
        """Returns extreme inputs, activations and losses, through the whole model and into all layers at once."""
        x = self._sample(0, generator)
        has_reals = any(value.is_floating_point() for value in x)
        records = {f"loss x {scale:g}": self._whole(x, scale, generator) for scale in (1e-20, 1.0, 1e6, 1e15)}
        if has_reals:
            records |= {f"input x {scale:g}": self._whole(scaled(x, scale), 1.0, generator) for scale in (0.0, 1e6)}
        records |= {f"layers x {scale:g}": self._into_all_layers(scale, 1.0, generator) for scale in (1.0, 1e6)}
        records["activations x 1e+06"] = self._into_all_layers(1.0, 1e6, generator)
        block, bound = self._last_block(generator), self.claim.max_grad_norm
        records |= {
            f"one layer, {n:g} bounds": block.record(torch.eye(len(block.labels))[0], n * bound) for n in BEYOND
        }
        not_finite = {"loss NaN": self._whole(x, math.nan, generator), "loss inf": self._whole(x, math.inf, generator)}
        not_finite["loss x 1e30"] = self._whole(x, 1e30, generator)  # finite, but its square is not
        not_finite["activations NaN"] = self._into_all_layers(1.0, math.nan, generator)
        if has_reals:
            values = (math.nan, math.inf)
            not_finite |= {f"input {v}": self._whole(scaled(x, v), 1.0, generator) for v in values}
        for name, sample in self._hostile.items():
            chosen = records if self._is_finite(sample) else not_finite
            chosen[name] = self._whole(sample, 1e6, generator)
        return [Hostile(name, record, name in records) for name, record in (records | not_finite).items()]

    @staticmethod
    def _offsets(released: Sequence[nn.Parameter]) -> dict[nn.Parameter, int]:
        """Returns where each parameter begins in the flat release."""
        sizes = (parameter.numel() for parameter in released)
        return dict(zip(released, itertools.accumulate(sizes, initial=0), strict=False))

    @property
    def left_out(self) -> list[str]:
        """Trained layers to which no chosen gradient can be sent: the model does not use them, or not by sample."""
        reached = {probe.name for probe in self._probes if probe.is_reached}
        return [name for name in self._trained if name not in reached]

    @property
    @abstractmethod
    def _trained(self) -> list[str]:
        """The names of all trained layers."""

    def _last_block(self, generator: torch.Generator) -> Block:
        """A block of the last layer; of one whose gradients can be chosen, if there is any."""
        reached = sorted((probe for probe in self._probes if probe.is_reached), key=lambda probe: probe.has_recipe)
        if not reached:
            raise ValueError("no layer of the model gives each sample an output of its own: there is nothing to audit")
        return reached[-1].blocks(1, generator)[-1]

    def _sample(self, number: int, generator: torch.Generator) -> Sample:
        sample = self._samples[number % len(self._samples)]
        return tuple(torch.randn(x.shape, generator=generator) for x in sample) if self._is_random else sample

    def _is_finite(self, sample: Sample) -> bool:
        with torch.no_grad():
            output = first_output(self._form.call(self._template, [sample] * 2))
        assert output is not None
        return bool(output.isfinite().all())

    def _whole(self, sample: Sample, scale: float, generator: torch.Generator) -> Record:
        return (Passage("", sample, scale * torch.randn(self._seen[""].output_shape, generator=generator)),)

    def _into_all_layers(self, scale: float, gain: float, generator: torch.Generator) -> Record:
        """Sends each layer what it was seen to take, times the gain."""
        parts: list[Excitation | Passage] = []
        for probe in self._probes:
            u = scale * torch.randn(probe.seen.output_shape, generator=generator)
            if not probe.has_recipe:
                parts += [Passage(probe.name, self._samples[0], u, gain)] if probe.is_reached else []
                continue
            (x,) = scaled((probe.seen.x,), gain)
            parts.append(Excitation(probe.name, slice(None), x.flatten(), slice(None), u.flatten()))
        return tuple(parts)

    def _backward(self, modules: Mapping[str, nn.Module], rows: Sequence[Record]) -> None:
        """Calls every layer that a record touches once, and makes one backward pass of the mean over the samples."""
        alone = dict.fromkeys(e.layer for record in rows for e in record if isinstance(e, Excitation))
        reached = dict.fromkeys(e.layer for record in rows for e in record if isinstance(e, Passage))
        if self._calls_every_layer or (rows and not alone and not reached):  # the samples must be seen to be there
            probes = [probe for probe in self._probes if probe.is_reached]
            for probe in probes if self._calls_every_layer else probes[-1:]:
                (alone if probe.has_recipe else reached)[probe.name] = None
        losses = [self._alone(modules[name], name, rows) for name in alone]
        losses += [self._reached(modules, name, rows) for name in reached]
        if losses:
            (torch.stack(losses).sum() / max(len(rows), 1)).backward()

    def _alone(self, layer: nn.Module, name: str, rows: Sequence[Record]) -> Tensor:
        """The loss of the records that call a layer by itself."""
        seen = self._seen[name]
        x = torch.zeros(len(rows), *seen.x.shape, dtype=seen.x.dtype)
        u = torch.zeros(len(rows), *seen.output_shape)
        for row, record in enumerate(rows):
            for e in record:
                if isinstance(e, Excitation) and e.layer == name:
                    x[row].view(-1)[e.x_at] = e.x.to(x.dtype)
                    u[row].view(-1)[e.u_at] = e.u.to(u.dtype)
        loss: Tensor = (layer(x) * u).sum()
        return loss

    def _reached(self, modules: Mapping[str, nn.Module], name: str, rows: Sequence[Record]) -> Tensor:
        """The loss of the records that go through the model as far as a layer."""
        seen = self._seen[name]
        samples, gains = [self._samples[0]] * len(rows), torch.ones(len(rows))
        u = torch.zeros(len(rows), *seen.output_shape)
        for row, record in enumerate(rows):
            for e in record:
                if isinstance(e, Passage) and e.layer == name:
                    samples[row], gains[row], u[row] = e.sample, e.gain, e.u
        if name:
            arguments = arguments_at(modules[""], modules[name], self._form, samples)
            args, kwargs = with_gains(arguments, seen.argument_axes, gains)
            output = first_output(modules[name](*args, **kwargs))
        else:
            output = first_output(self._form.call(modules[name], samples))
        assert output is not None
        assert seen.output_axis is not None
        return weighed(output, seen.output_axis, u)


def _switch_dropout_off(model: nn.Module) -> None:
    """Sets all probabilities of dropout to zero: they make the gradients random, and not the release."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():  # of recurrent layers, attention, and modules that call F.dropout
            if "drop" in name.lower() and isinstance(value, float):
                setattr(module, name, 0.0)
