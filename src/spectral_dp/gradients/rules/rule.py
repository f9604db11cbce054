"""What a layer kind must know: norms and clipped sums of its filtered per-sample gradients.

Letters, here and in every rule:

    B   samples            x   (B, ...) input of the layer, as recorded
    M   kept coordinates   dA  (B, ...) gradient of the loss with respect to the layer's output
    c   (B,) weight of each sample, the clipping factors

The per-sample gradient ``g_b`` of a layer is never released. What leaves a rule is ``sum_b c_b z_b`` with
``z_b = a * (T g_b)`` (``perturbation.py``), and the squared norms ``||z_b||²`` from which the ``c_b`` are made. Weight
and bias of a layer are one block: their squared norms add.

A rule for a layer of your own is a subclass of :class:`Rule`, registered with :func:`register_rule`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from spectral_dp.gradients.kinds import Behaviour, behaviour, overrides
from spectral_dp.mechanism.clipping import row_norms
from spectral_dp.mechanism.filters import Filter, IdentityFilter
from spectral_dp.mechanism.gains import Gains
from spectral_dp.mechanism.transforms import Transform, TransformName, get_transform

#: Temporaries of a batch are made for some samples at a time, as many as fit into this.
CHUNK_BYTES = 4 * 2**20

Module = TypeVar("Module", bound=nn.Module)
Support = Literal["kernel", "signal"]


@dataclass(frozen=True)
class LayerConfig:
    """What is released of one layer.

    Attributes:
        filter: Gains of the coordinates.
        transform: Name of the transform; the layer kind's own default where None.
        support: For convolutions, whether the spectrum is that of the kernel (default) or, as in the paper's
            Algorithm 2, that of the padded input.
        input_layout: For dense layers fed by an image or a sequence: the shape ``(C, H, W)`` or ``(L,)`` that was
            flattened into their input. Their gradient is then filtered over the spectrum of that input.
    """

    filter: Filter = field(default_factory=IdentityFilter)
    transform: TransformName | None = None
    support: Support = "kernel"
    input_layout: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.support not in ("kernel", "signal"):
            raise ValueError(f"unknown support {self.support!r}: choose 'kernel' or 'signal'")


class Rule(ABC, Generic[Module]):
    """Norms and clipped sums of one layer's per-sample gradients, in filtered spectral coordinates.

    Exactness: every method agrees with a loop over samples to rounding; none approximates.

    Attributes:
        module: The layer.
        spectral: What is released of it.
        gains: The filter's gains of the current step, or None where nothing is filtered: then no transform is made
            either, since without a filter an orthonormal transform changes nothing.
    """

    #: Transform used where the layer's :class:`LayerConfig` names none.
    default_transform: ClassVar[TransformName] = "dct"

    def __init__(self, module: Module, spectral: LayerConfig) -> None:
        self.module = module
        self.spectral = spectral
        self.transform: Transform = get_transform(spectral.transform or self.default_transform)
        self.gains: Gains | None = None
        self._matrices_of: Gains | None = None
        self._matrices: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self.begin_step(0)

    def begin_step(self, step: int) -> None:
        """Fixes the gains of a step, before it reads any data."""
        filter, shape = self.spectral.filter, self.coordinate_shape()
        if isinstance(filter, IdentityFilter):
            return
        if shape is None:
            raise ValueError(
                f"{type(self.module).__name__} has no spectrum to filter, but was given {filter!r}: leave the filter "
                "out for this layer, or give the input_layout of a dense layer fed by an image or a sequence"
            )
        self.gains = filter.gains(self.transform, shape, step)

    def coordinate_shape(self) -> tuple[int, ...] | None:
        """Returns the shape over which the weight is transformed and filtered; None if it is not."""
        return None

    def leading_shape(self) -> tuple[int, ...]:
        """Returns the dimensions of the weight that are not transformed."""
        shape = self.coordinate_shape()
        return tuple(self.parameter("weight").shape[: -len(shape)]) if shape else ()

    def coefficient_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a parameter's coefficients in :meth:`clipped_sum`, known without any data."""
        if name == "weight" and self.gains is not None:
            return (*self.leading_shape(), self.gains.count)
        return tuple(self.parameter(name).shape)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that the rule covers: the module's own, each once."""
        first_names: dict[nn.Parameter, str] = {}
        for name, parameter in self.module._parameters.items():
            if parameter is not None:
                first_names.setdefault(parameter, name)
        return {name: parameter for parameter, name in first_names.items()}

    def parameter(self, name: str) -> nn.Parameter:
        """Returns one of them."""
        return self.parameters()[name]

    @property
    def dtype(self) -> torch.dtype:
        """What to compute in, whatever autocast or a half-precision model made of inputs and gradients."""
        return torch.promote_types(next(iter(self.parameters().values())).dtype, torch.float32)

    def trains(self, name: str) -> bool:
        """Returns whether the layer has a parameter of this name that is being trained."""
        parameter = self.module._parameters.get(name)
        return parameter is not None and parameter.requires_grad

    def condense(self, x: Any, dA: Tensor) -> tuple[Any, Tensor]:
        """Returns what to keep of a use until the clipping factors are known; by default all of it.

        Called when the backward pass is at the layer, while ``x`` and ``dA`` are still in cache. A rule that forms the
        per-sample gradients returns them, as :class:`Formed`, and the rest is not held any longer. The other methods
        take either.
        """
        return x, dA

    @abstractmethod
    def squared_norms(self, x: Any, dA: Tensor) -> Tensor:
        """Returns ``||z_b||²`` over all trained parameters of the layer, ``(B,)``."""

    @abstractmethod
    def clipped_sum(self, x: Any, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Returns ``sum_b c_b z_b`` of each trained parameter, kept coordinates last: ``(..., M)``."""

    @abstractmethod
    def per_sample(self, x: Any, dA: Tensor) -> dict[str, Tensor]:
        """Returns, of each trained parameter, the coordinates ``(B, ...)`` whose norm is clipped.

        The slow way, for parameters that are used more than once: their gradients must be added before the norm is
        taken. In the paper's order (clip, then filter) this includes coordinates that are dropped afterwards.
        """

    def merge(self, uses: Sequence[tuple[Any, Tensor]]) -> tuple[Any, Tensor] | None:
        """Returns one use ``(x, dA)`` with the gradient of several, if the layer kind can express it; else None."""
        formed = [x.gradients for x, _ in uses if isinstance(x, Formed)]
        if len(formed) < len(uses):
            return None
        return Formed({name: sum((g[name] for g in formed[1:]), formed[0][name]) for name in formed[0]}), uses[0][1]

    def gradient(self, name: str, coefficients: Tensor) -> Tensor:
        """Turns coefficients of a parameter, noisy or not, into a gradient: post-gain, inverse transform."""
        if name == "weight" and self.gains is not None:
            coefficients = self.synthesise(coefficients)
        return coefficients.reshape(self.parameter(name).shape)

    def analyse(self, signal: Tensor, *, counted: bool = False) -> Tensor:
        """Coordinates ``(..., M)`` of ``(..., *coordinate_shape)``, times the pre-gains.

        The kept ones; or with ``counted`` all that count in the clipped norm, which in the paper's order (clip, then
        filter) are more.
        """
        assert self.gains is not None
        dims = tuple(range(-self.gains.pre.ndim, 0))
        if self._is_short:
            projection = self.projection(signal, counted=counted)
            assert projection is not None
            return signal.flatten(-len(dims)) @ projection.T
        z = self.transform.forward(signal, dims)
        if counted and self.gains.clips_dropped:
            return (z * self.gains.pre.to(z)).flatten(-len(dims))[..., self.gains.counted.flatten().to(z.device)]
        z = self.gains.compress(z)
        return z if self.gains.kept_pre is None else z * self.gains.kept_pre.to(z)

    def synthesise(self, coefficients: Tensor) -> Tensor:
        """Signal ``(..., *coordinate_shape)`` of kept coordinates ``(..., M)``, after the post-gains."""
        assert self.gains is not None
        if self._is_short:
            back = self._matrix("back", coefficients)
            return (coefficients @ back).unflatten(-1, self.gains.pre.shape)
        if self.gains.kept_post is not None:
            coefficients = coefficients * self.gains.kept_post.to(coefficients)
        return self.transform.inverse(self.gains.expand(coefficients), tuple(range(-self.gains.pre.ndim, 0)))

    def projection(self, like: Tensor, *, counted: bool = False) -> Tensor | None:
        """Kept (or counted) basis vectors times their pre-gains, ``(M, N)``; None without a filter."""
        return None if self.gains is None else self._matrix("counted" if counted else "kept", like)

    @property
    def _is_short(self) -> bool:
        """Whether the signal is so short that a matrix of the kept basis vectors beats transform and filter."""
        return self.gains is not None and self.gains.pre.numel() <= self.transform.matmul_limit

    def _matrix(self, use: Literal["kept", "counted", "back"], like: Tensor) -> Tensor:
        """Rows of the basis times their gains; for the way back, post-gains. Made once for the same gains."""
        gains, key = self.gains, (use, like.dtype, like.device)
        assert gains is not None
        if self._matrices_of is not gains:
            self._matrices_of, self._matrices = gains, {}
        if key not in self._matrices:
            basis = self.transform.basis(gains.pre.shape, dtype=like.dtype, device=like.device)
            rows = (gains.counted if use == "counted" else gains.kept).flatten().to(like.device)
            gain = (gains.post if use == "back" else gains.pre).flatten().to(like)
            self._matrices[key] = (gain[:, None] * basis)[rows]
        return self._matrices[key]

    def kept_of_counted(self, name: str, z: Tensor) -> Tensor:
        """Picks, from what :meth:`per_sample` returned, what is released."""
        if name != "weight" or self.gains is None or not self.gains.clips_dropped:
            return z
        return z[..., self.gains.kept.flatten()[self.gains.counted.flatten()].to(z.device)]


_RULES: dict[type[nn.Module], Callable[[Any, LayerConfig], Rule[Any]]] = {}
_KINDS: dict[type[nn.Module], tuple[Behaviour, frozenset[str] | None]] = {}
RuleType = TypeVar("RuleType", bound=Callable[[Any, LayerConfig], Rule[Any]])


def register_rule(
    *module_types: type[nn.Module], parameters: Iterable[str] | None = None
) -> Callable[[RuleType], RuleType]:
    """Registers a rule (or a function that returns one) for these kinds of layer; the latest registration wins.

    A subclass of a registered layer uses its rule too, unless it overrides something that ``forward`` uses.

    Args:
        module_types: The kinds of layer.
        parameters: Names of all parameters that the rule gives gradients of. A layer that has others, such as those
            that its weight is computed from (weight_norm, spectral_norm, prune), does not use the rule. None where the
            rule covers whatever its layer has.
    """
    names = None if parameters is None else frozenset(parameters)

    def decorate(rule: RuleType) -> RuleType:
        for module_type in module_types:
            _RULES[module_type] = rule
            _KINDS[module_type] = behaviour(module_type), names
        return rule

    return decorate


def find_rule(module: nn.Module) -> Callable[[Any, LayerConfig], Rule[Any]] | None:
    """Returns the registered rule of a layer; None if there is none, or the layer is not what the rule is for."""
    kind = next((kind for kind in type(module).__mro__ if kind in _RULES), None)
    return None if kind is None or differences(module) else _RULES[kind]


def differences(module: nn.Module) -> list[str]:
    """Returns in what a layer differs from the kind that has a rule: names it overrides, parameters it adds."""
    kind = next((kind for kind in type(module).__mro__ if kind in _RULES), None)
    if kind is None:
        return []
    expected, names = _KINDS[kind]
    own = (name for name, parameter in module._parameters.items() if parameter is not None)
    return overrides(module, expected) + [name for name in own if names is not None and name not in names]


class Formed(NamedTuple):
    """Per-sample gradients, formed because that is the cheapest way to their norms or because they are small.

    They stand for a layer's input and output gradient, which are then no longer needed. Norms and sums are taken of the
    same numbers, so that the errors made in forming them cannot come between the two.

    Attributes:
        gradients: By parameter, those coordinates that count in the norm, ``(B, ...)``, in any order.
    """

    gradients: dict[str, Tensor]

    @classmethod
    def of(cls, gradients: dict[str, Tensor], dA: Tensor) -> tuple[Formed, Tensor]:
        """A condensed use, with a stub of ``dA`` that only tells how many samples there are."""
        return cls(gradients), dA.new_empty(len(dA), 0)

    def squared_norms(self, stub: Tensor) -> Tensor:
        """``||z_b||²``, ``(B,)``."""
        start = torch.zeros(len(stub), dtype=torch.float64, device=stub.device)
        return sum((row_norms(z).square() for z in self.gradients.values()), start)

    def weighted_sums(self, c: Tensor) -> dict[str, Tensor]:
        """``sum_b c_b z_b``, in the order that the gradients are in."""
        return {name: weighted_sum(c, z) for name, z in self.gradients.items()}


class FormedRule(Rule[Module]):
    """Rule of a layer whose per-sample gradients are simply formed: a subclass has one method, :meth:`form`.

    Formal guarantee. Norm and sum are of the same numbers, whatever :meth:`form` computes, and a sample that is left
    out is removed from those numbers, not from what they are made of. So neither rounding, underflow nor a function
    that is not finite at zero can make a sample count for more than its bound.

    Holds ``B`` times the layer's parameters from its backward pass until the clipped sum, in place of ``x`` and ``dA``.
    """

    @abstractmethod
    def form(self, x: Any, dA: Tensor) -> dict[str, Tensor]:
        """Returns the gradients ``(B, ...)`` of each trained parameter."""

    def condense(self, x: Any, dA: Tensor) -> tuple[Any, Tensor]:
        return (x, dA) if isinstance(x, Formed) else Formed.of(self.form(x, dA), dA)

    def per_sample(self, x: Any, dA: Tensor) -> dict[str, Tensor]:
        return self.condense(x, dA)[0].gradients

    def squared_norms(self, x: Any, dA: Tensor) -> Tensor:
        formed, stub = self.condense(x, dA)
        return formed.squared_norms(stub)

    def clipped_sum(self, x: Any, dA: Tensor, c: Tensor) -> dict[str, Tensor]:
        return self.condense(x, dA)[0].weighted_sums(c)


def in_chunks(samples: int, numbers_each: int, like: Tensor) -> Iterator[slice]:
    """Slices of a batch whose temporaries take a few megabytes (two samples or more: one per core), at least one.

    They stay in cache, and their memory is reused instead of being mapped (and page-faulted) anew, which can cost more
    than the arithmetic.
    """
    size = max(2, CHUNK_BYTES // (numbers_each * like.element_size()))
    return (slice(start, start + size) for start in range(0, max(samples, 1), size))


def as_tokens(t: Tensor) -> Tensor:
    """``(B, ..., n) -> (B, T, n)``."""
    return t[:, None] if t.ndim == 2 else t.flatten(1, -2)


def over_tokens(dA: Tensor) -> Tensor:
    """``(B, T, m) -> (B, m)``, summed: the gradient of a bias."""
    return dA[:, 0] if dA.shape[1] == 1 else dA.sum(1)


def merge_tokens(uses: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several uses of a layer whose gradient is a sum over tokens: all their tokens side by side."""
    return torch.cat([as_tokens(x) for x, _ in uses], dim=1), torch.cat([as_tokens(dA) for _, dA in uses], dim=1)


def weigh(x: Tensor, dA: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Multiplies the smaller of ``x`` and ``dA`` by ``c``, sample by sample: a product of the two is then weighted."""
    if x.numel() < dA.numel():
        return scale(x, c), dA
    return x, scale(dA, c)


def weighted_sum(c: Tensor, z: Tensor) -> Tensor:
    """``sum_b c_b z_b``, ``(B, ...) -> (...)``."""
    rows = z[:, None] if z.ndim == 1 else z.flatten(1)  # a scalar parameter has one number a sample
    return (c.to(z.dtype) @ rows).view(z.shape[1:])


def scale(t: Tensor, c: Tensor) -> Tensor:
    """``t_b c_b``."""
    return t * c.to(t.dtype).view(-1, *[1] * (t.ndim - 1))
