"""The per-sample gradients of a whole model, layer by layer: norms first, then clipped sums.

    gradients = ModelGradients(model)
    loss(model(x), y).sum().backward()            # autograd computes no plain weight gradients
    batch = gradients.take()
    norms = batch.squared_norms()                 # (L, B), one row a block
    sums = batch.clipped_sums(c)                  # {parameter: coefficients}

A *block* is a layer, weight and bias together, or several layers that share parameters. A parameter that is used
several times, in one layer or many, has its gradients added before the norm is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spectral_dp.gradients.blocks import Layer, by_shared_parameters, layers_of
from spectral_dp.gradients.compatibility import validate
from spectral_dp.gradients.merging import AnyUse, merged
from spectral_dp.gradients.precision import full_precision
from spectral_dp.gradients.recording.call import Call, TakenOver
from spectral_dp.gradients.recording.recorder import Recorder
from spectral_dp.gradients.recording.state import StateGuard
from spectral_dp.gradients.rules.dense_maps import DenseMapsRule
from spectral_dp.gradients.rules.fallback import FallbackRule
from spectral_dp.gradients.rules.held import HeldRule
from spectral_dp.gradients.rules.layer_config import LayerConfig
from spectral_dp.gradients.rules.registry import differences
from spectral_dp.gradients.rules.rule import Rule
from spectral_dp.gradients.uses import Formed, Recorded, Use, condense, condense_rows


class Owner(NamedTuple):
    """The rule that turns a parameter's coefficients into a gradient, and the name it knows the parameter by."""

    rule: Rule[Any]
    name: str


class ModelGradients:
    """Watches a model and gives the norms and clipped sums of its per-sample gradients.

    Args:
        model: Any module that treats samples independently; see :mod:`spectral_dp.gradients.compatibility`.
        configs: What is released of each layer, by layer name; layers not named are not filtered.

    Attributes:
        model: The model.
        state: Watches what forward passes leave behind in it.
        blocks: The layers, those that share parameters together.
        named_parameters: The parameters that the model had when this was made, each by its first name.
    """

    def __init__(self, model: nn.Module, configs: Mapping[str, LayerConfig] | None = None) -> None:
        validate(model)
        self.model = model
        layers = layers_of(model, dict(configs or {}))
        self.blocks = by_shared_parameters(layers)
        self.named_parameters = dict(model.named_parameters())
        self._owners: dict[nn.Parameter, Owner] = {}
        for layer in layers:
            for name, parameter in layer.rule.parameters().items():
                self._owners.setdefault(parameter, Owner(layer.rule, name))
        _check_covered(model, self._owners)
        self.state = StateGuard(model)
        self._rules = {layer.rule.module: layer.rule for layer in layers}
        self._recorder: Recorder[Use] = Recorder(
            {m: rule.parameters().values() for m, rule in self._rules.items() if not isinstance(rule, HeldRule)},
            self._condense(),
            with_output={module for module, rule in self._rules.items() if rule.needs_output},
            taken_over={m: rule.by_sample for m, rule in self._rules.items() if isinstance(rule, DenseMapsRule)},
            held={m: rule.parameters() for m, rule in self._rules.items() if isinstance(rule, HeldRule)},
            needs_input=self._needs_input(),
            members=model.modules(),
        )

    def _condense(self) -> Callable[[nn.Module, Call, Any], Use | TakenOver]:
        this = weakref.ref(self)  # as the recorder's hooks: the last reference to this is the user's

        def at_layer(module: nn.Module, call: Call, dA: Any) -> Use | TakenOver:
            gradients = this()
            if gradients is None:
                raise ReferenceError("the per-sample gradients that this model was recorded for are gone")
            if isinstance(dA, Tensor) and dA.ndim == 0:
                raise RuntimeError(
                    f"{type(module).__name__} returned a single number for the whole batch, such as the loss, in which "
                    "the samples cannot be told apart: return one entry for each sample (the logits, or the loss with "
                    "reduction='none') and reduce it outside of the module"
                )
            rule = gradients._rules[module]
            if call.parameter is not None:
                own = {rule.parameters()[call.parameter]: dA.to(rule.dtype)}
                return Formed((rule,), own, len(dA), torch.finfo(dA.dtype).eps)
            if isinstance(rule, DenseMapsRule):
                with gradients._undisturbed():
                    use, input_gradients = rule.back(call, dA)
                return TakenOver(Recorded(rule, *use), input_gradients)
            keep = condense_rows if call.has_rows else condense
            return keep(rule, rule.input_of(call), dA, gradients._undisturbed)

        return at_layer

    def _needs_input(self) -> Callable[[nn.Module], bool]:
        rules = self._rules  # and not this object, which the recorder's hooks would keep alive
        return lambda module: rules[module].needs_input()

    def expect(self, samples: Callable[[], int | None]) -> None:
        """Lets forward passes know how many rows the batch at hand has, where their arguments leave a doubt."""
        self._recorder.expected_samples = samples

    def begin_step(self, step: int) -> None:
        """Fixes the gains of every layer for a step, before it reads any data."""
        for block in self.blocks:
            for layer in block:
                layer.rule.begin_step(step)

    def take(self, views: int = 1) -> RecordedBatch:
        """Returns what one backward pass recorded; see :meth:`take_all`."""
        batches = self.take_all(views)
        if len(batches) > 1:
            raise ValueError("several backward passes were recorded: take each by itself, or all by take_all()")
        return batches[0] if batches else RecordedBatch(self, {}, views)

    def take_all(self, views: int = 1) -> list[RecordedBatch]:
        """Returns what has been recorded since the last call: one batch for each backward pass.

        All forward passes behind *one* backward pass are taken to be of the same samples, so what a sample did in any
        of them is clipped together. Different backward passes are taken to be of different samples.

        Args:
            views: How many rows of the batch, next to each other, belong to one sample; their gradients are added
                before the norm is taken.
        """
        self._check_model()
        self._check_layers()
        self.state.check()
        return self.take_unchecked(views)

    def take_unchecked(self, views: int = 1) -> list[RecordedBatch]:
        """As :meth:`take_all`, whatever the passes left behind in the model: for passes that are not released."""
        captures = self._recorder.take()
        passes = dict.fromkeys(c.backward_pass for recorded in captures.values() for c in recorded)
        return [
            RecordedBatch(self, {m: [c.kept for c in cs if c.backward_pass == p] for m, cs in captures.items()}, views)
            for p in passes
        ]

    def observe(self, parameter: nn.Parameter, released: Tensor, noise_std: float) -> None:
        """Shows released coefficients to the filter of their layer, which may learn from them."""
        rule, name = self._owners[parameter]
        if name == "weight" and rule.gains is not None:
            rule.config.filter.observe(released, noise_std)

    def filter_state(self) -> dict[str, dict[str, Any]]:
        """Returns what the filters have learnt, by layer name; belongs in the checkpoint."""
        states = {name: rule.config.filter.state_dict() for block in self.blocks for name, rule in block}
        return {name: state for name, state in states.items() if state}

    def load_filter_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restores :meth:`filter_state`."""
        rules = {name: rule for block in self.blocks for name, rule in block}
        if unknown := set(states) - set(rules):
            raise ValueError(f"filter state of layers that the model does not have: {sorted(unknown)}")
        for name, state in states.items():
            rules[name].config.filter.load_state_dict(state)

    def owner(self, parameter: nn.Parameter) -> Owner:
        """Returns the rule of a parameter's layer, and the name it knows the parameter by."""
        return self._owners[parameter]

    def gradient(self, parameter: nn.Parameter, coefficients: Tensor) -> Tensor:
        """Turns coefficients of a parameter, noisy or not, into its gradient."""
        rule, name = self._owners[parameter]
        return rule.gradient(name, coefficients)

    def zeros(self, parameter: nn.Parameter) -> Tensor:
        """Coefficients of a parameter that no sample contributed to. They are released like any other."""
        rule, name = self._owners[parameter]
        return parameter.new_zeros(rule.coefficient_shape(name), dtype=rule.dtype, requires_grad=False)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """All parameters of the model, trained or not."""
        return set(self._owners)

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that are being trained, in a fixed order."""
        return [p for p in self._owners if p.requires_grad]

    @property
    def trained_blocks(self) -> list[tuple[list[Layer], list[nn.Parameter]]]:
        """The blocks of which something is being trained, with those parameters; each once."""
        blocks = [
            (block, list(dict.fromkeys(p for _, rule in block for p in rule.trained().values())))
            for block in self.blocks
        ]
        return [(block, parameters) for block, parameters in blocks if parameters]

    def discard(self) -> None:
        """Forgets what has been recorded."""
        self.state.check()
        self._recorder.take()

    def _check_model(self) -> None:
        """The model may have been changed since, in ways that would let raw data out."""
        validate(self.model)
        _check_covered(self.model, self._owners)

    def _check_layers(self) -> None:
        """A layer that was patched since may have another gradient than its rule computes."""
        for name, rule in (layer for block in self.blocks for layer in block):
            if not isinstance(rule, FallbackRule | HeldRule) and (changed := differences(rule.module)):
                raise RuntimeError(
                    f"layer {name!r} got {changed} of its own after the model was made private, so its rule no longer "
                    "tells its gradient: change the model first, then make it private"
                )

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Rules run without autograd, in full precision, and are not recorded when they call a module."""
        device = next(iter(self._owners)).device.type
        with (
            torch.no_grad(),
            torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext(),
            full_precision(),
            self._recorder.paused(),
            self.state.paused(),
        ):
            yield

    def remove(self) -> None:
        """Stops watching the model and leaves no trace on it."""
        self._recorder.remove()
        self.state.remove()


class RecordedBatch:
    """What one backward pass recorded of every trained block.

    Args:
        gradients: Those of the model.
        uses: The uses of each layer.
        views: How many rows of the batch, next to each other, belong to one sample.
    """

    def __init__(self, gradients: ModelGradients, uses: Mapping[nn.Module, list[Use]], views: int = 1) -> None:
        self._gradients = gradients
        uses_of_blocks = [
            [view for _, rule in block for use in uses.get(rule.module, ()) for view in _views(use, views)]
            for block, _ in gradients.trained_blocks
        ]
        self.size = self._common_size(uses_of_blocks)
        self._blocks: list[Sequence[AnyUse]] = [*uses_of_blocks]
        if self.size and any(len(block) > 1 for block in uses_of_blocks):
            with gradients._undisturbed():
                self._blocks = [merged(block) for block in uses_of_blocks]
        self._added: dict[int, Formed] = {}

    @property
    def precision(self) -> float:
        """The unit of the coarsest arithmetic in which output gradients arrived."""
        return max((use.precision for block in self._blocks for use in block), default=0.0)

    def squared_norms(self) -> Tensor:
        """Returns ``||z_b||²`` of every trained block, ``(L, B)`` in float64; zeros where it was not used."""
        device = next((p.device for p in self._gradients.trained), None)
        with self._gradients._undisturbed():
            unused = torch.zeros(self.size, dtype=torch.float64, device=device)
            norms = [
                self._use(i).squared_norms().to(unused) if block and self.size else unused
                for i, block in enumerate(self._blocks)
            ]
            return torch.stack(norms) if norms else unused[None, :][:0]

    def clipped_sums(self, c: Tensor) -> dict[nn.Parameter, Tensor]:
        """Returns ``sum_b c_b z_b`` of every trained parameter, used or not.

        Args:
            c: Weights ``(B,)``, or ``(L, B)`` where blocks are clipped by themselves. A sample with weight zero is
                left out altogether: no rule sees it, so its NaN or infinity cannot spread. So is one whose weight is
                too small for the precision of the sum, in which it would be rounded, perhaps upwards.
        """
        gradients = self._gradients
        sums: dict[nn.Parameter, Tensor] = {}
        rules = (rule for block in self._blocks for use in block for rule in use.rules)
        counts = c.abs() >= max((torch.finfo(dtype).tiny for dtype in {rule.dtype for rule in rules}), default=0.0)
        all_count = bool(counts.all())
        with gradients._undisturbed():
            for i, block in enumerate(self._blocks):
                if not self.size:  # nothing to add up; but rules learn from their uses how large their spectrum is
                    sums |= {p: z for use in block for p, z in use.clipped_sums(c.new_zeros(0)).items()}
                elif block:
                    at = ... if c.ndim == 1 else i
                    sums |= _clipped_sums(self._use(i), c[at], None if all_count else counts[at].nonzero().flatten())
                    self._added.pop(i, None)
            return {p: sums[p] if p in sums else gradients.zeros(p) for p in gradients.trained}

    def _use(self, i: int) -> AnyUse:
        """The one use of a block; of several, their gradients added: formed for the norm, and held until the sum."""
        if len(self._blocks[i]) == 1:
            return self._blocks[i][0]
        if i not in self._added:
            self._added[i] = Formed.added(self._blocks[i])
        return self._added[i]

    def _common_size(self, blocks: list[list[Use]]) -> int:
        names = {layer.rule: layer.name for block in self._gradients.blocks for layer in block}
        sizes = {use.size: names[use.rules[0]] for block in blocks for use in block}
        if len(sizes) > 1:
            # Without numbers: how many samples a batch has is private, and errors end up in log files.
            raise ValueError(
                f"layers {' and '.join(map(repr, sizes.values()))} saw different numbers of rows: keep samples in the "
                "first dimension of every layer's input; give a layer whose input all samples share, such as their "
                "positions, a row for each sample (x.expand(len(batch), ...)); and without a PrivacyEngine call "
                "take() after each batch"
            )
        return next(iter(sizes), 0)


def _views(use: Use, views: int) -> Iterator[Use]:
    """The views of each sample as uses of their own."""
    if use.size % views:
        raise ValueError(f"the rows of a batch do not divide by views={views}: put the views of a sample side by side")
    return (use if views == 1 else use.select(slice(view, None, views)) for view in range(views))


def _clipped_sums(use: AnyUse, c: Tensor, counting: Tensor | None) -> dict[nn.Parameter, Tensor]:
    """Of the samples with these numbers, or of all."""
    return use.clipped_sums(c) if counting is None else use.select(counting).clipped_sums(c[counting])


def _check_covered(model: nn.Module, owners: Mapping[nn.Parameter, Owner]) -> None:
    for name, parameter in model.named_parameters():
        if parameter not in owners:
            raise ValueError(
                f"parameter {name!r} was not there when the model was made private, so nothing protects what it "
                "learns: change the model first, then make it private"
            )
