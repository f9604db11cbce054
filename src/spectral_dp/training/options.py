"""What ``make_private`` and ``make_private_with_epsilon`` take, as type checkers and ``help()`` are told."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, Required, TypedDict, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from spectral_dp.accounting import Phase
from spectral_dp.mechanism.clipping import Clipping, ClippingName
from spectral_dp.training.config import SpectralConfig
from spectral_dp.training.optimizer import LossReduction

Function = TypeVar("Function", bound=Callable[..., Any])


class PrivateOptions(TypedDict, total=False):
    """The arguments of :meth:`PrivacyEngine.make_private`, but for those that its overloads tell apart."""

    module: Required[nn.Module]
    optimizer: Required[Optimizer]
    data_loader: Required[DataLoader[Any]]
    max_grad_norm: Required[float | Sequence[float]]
    criterion: Callable[..., Tensor] | None
    batch_first: bool
    loss_reduction: LossReduction
    poisson_sampling: bool
    clipping: ClippingName | Clipping
    noise_allocation: Literal["uniform", "optimal"]
    spectral: SpectralConfig | None
    max_physical_batch_size: int | None
    augmentation_multiplicity: int
    sample_rate: float | None
    rehearsal: bool
    noise_generator: None
    wrap_model: bool
    rand_on_empty: bool


class BudgetOptions(PrivateOptions, total=False):
    """The arguments of :meth:`PrivacyEngine.make_private_with_epsilon`."""

    target_epsilon: Required[float]
    target_delta: Required[float]
    epochs: Required[float]
    stop_at_budget: bool
    other_releases: Sequence[Phase]


def with_arguments_of(other: Callable[..., Any], *, without: str) -> Callable[[Function], Function]:
    """Lets a function that hands its ``**options`` to another function take and show the arguments of that one.

    ``help()`` and editors list them with their defaults. A call with an argument too many or too few is a
    ``TypeError`` before anything is done.

    Args:
        other: The function that gets the options.
        without: Name of an argument of it that the function computes itself.
    """

    def decorate(function: Function) -> Function:
        mine, theirs = inspect.signature(function), inspect.signature(other).parameters
        own = [p for p in mine.parameters.values() if p.kind is not p.VAR_KEYWORD]
        taken = [p for name, p in theirs.items() if name not in (without, *mine.parameters)]
        signature = mine.replace(parameters=[*own, *taken])

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            signature.bind(*args, **given)
            return function(*args, **given)

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__annotations__ = {**function.__annotations__, **{p.name: p.annotation for p in taken}}
        return cast(Function, call)

    return decorate
