"""A context manager that limits the physical batch size, like Opacus' class of the same name."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from spectral_dp.training.optimizer import PrivateOptimizer
from spectral_dp.training.sampling import PoissonLoader


class BatchMemoryManager:
    """Limits the ``max_physical_batch_size`` of a private loader within a ``with`` block.

    >>> import torch
    >>> from torch import nn
    >>> from spectral_dp import PrivacyEngine
    >>> model = nn.Linear(3, 1)
    >>> records = torch.utils.data.TensorDataset(torch.randn(64, 3))
    >>> model, optimizer, loader = PrivacyEngine().make_private(
    ...     module=model,
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     data_loader=torch.utils.data.DataLoader(records, batch_size=32),
    ...     noise_multiplier=1.0,
    ...     max_grad_norm=1.0,
    ... )
    >>> with BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer) as smaller:
    ...     for (x,) in smaller:
    ...         assert len(x) <= 8
    ...         optimizer.zero_grad()
    ...         model(x).mean().backward()
    ...         optimizer.step()  # releases, and descends, when the logical batch is over
    >>> optimizer.steps == len(loader) == 2
    True

    Formal guarantee. The release does not change:

    * The ``with`` statement gives the private loader itself, so there is only one way to draw batches, and every batch
      is drawn once.
    * The physical batches of a logical batch are clipped and summed one by one, the noise is added once, and the ledger
      gets one entry.
    * The optimizer refuses a schedule that changes noise or clipping between two physical batches of a logical one. The
      number of physical batches is as secret as the size of the logical batch.

    ``len(smaller)`` is still the number of logical batches.

    Args:
        data_loader: The loader that ``make_private`` returned.
        max_physical_batch_size: The largest number of records to load at once.
        optimizer: The optimizer that ``make_private`` returned.
    """

    def __init__(
        self, *, data_loader: DataLoader[Any], max_physical_batch_size: int, optimizer: PrivateOptimizer
    ) -> None:
        if not isinstance(optimizer, PrivateOptimizer):
            raise TypeError(
                f"optimizer must be the one that make_private of spectral_dp returned, got {type(optimizer).__name__}"
            )
        if not isinstance(data_loader, PoissonLoader):
            raise TypeError(
                f"a {type(data_loader).__name__} makes its own batches, which cannot be split: give the loader that "
                "make_private(poisson_sampling=True) returned, or make a DataLoader with a smaller batch_size"
            )
        if max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size must be at least 1, got {max_physical_batch_size}")
        self._loader, self._limit = data_loader, max_physical_batch_size
        self._before: int | None = None

    def __enter__(self) -> PoissonLoader:
        self._before = self._loader.max_physical_batch_size
        self._loader.max_physical_batch_size = min(self._limit, self._before or self._limit)
        return self._loader

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loader.max_physical_batch_size = self._before
