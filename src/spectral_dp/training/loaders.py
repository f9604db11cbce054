"""Chooses the loader of a private run, and the sampling rate at which its steps are accounted for."""

from __future__ import annotations

from typing import Any

from torch.utils import data

from spectral_dp.accounting.privacy_loss import checked
from spectral_dp.relations import Relation
from spectral_dp.training.coins import Coins
from spectral_dp.training.sampling import CountingLoader, PoissonLoader


def private_loader(
    data_loader: data.DataLoader[Any],
    *,
    poisson_sampling: bool,
    sample_rate: float | None,
    relation: Relation,
    coins: Coins,
    max_physical_batch_size: int | None = None,
) -> PoissonLoader | CountingLoader:
    """Returns the loader to train with. The arguments are those of ``PrivacyEngine.make_private``."""
    if isinstance(data_loader.sampler, data.DistributedSampler):
        raise ValueError(
            "a DistributedSampler would choose the records of each process a second time: make the DataLoader with "
            "batch_size (of all processes together) and shuffle only. With an initialised process group each process "
            "draws from its own shard of the records"
        )
    if poisson_sampling:
        if sample_rate is not None:
            raise ValueError("sample_rate is the batch size over the number of records: leave it out, or do not sample")
        return PoissonLoader.from_data_loader(data_loader, max_physical_batch_size=max_physical_batch_size, coins=coins)
    if sample_rate is None:
        raise ValueError(
            "without Poisson sampling the batches of a loader are not what the accountant assumes: use "
            "poisson_sampling=True, or relation=Relation.REPLACE_ONE and sample_rate=1.0, which claims nothing of "
            "sampling"
        )
    if isinstance(data_loader, PoissonLoader):
        raise ValueError("the loader samples by Poisson already: leave poisson_sampling and sample_rate out")
    if coins.share < 1:
        raise ValueError(
            "several processes train together with poisson_sampling=True only: without it, each of them would take the "
            "same records from its loader"
        )
    _check_loader_as_it_is(data_loader, checked("sample_rate", sample_rate), relation)
    if max_physical_batch_size is not None:
        raise ValueError("max_physical_batch_size needs poisson_sampling=True: the loader makes its own batches")
    if data_loader.batch_size is None:
        raise ValueError("the DataLoader has batch_size=None, so there is no public divisor: set batch_size")
    return CountingLoader(data_loader)


def _check_loader_as_it_is(data_loader: data.DataLoader[Any], sample_rate: float, relation: Relation) -> None:
    """Raises ``ValueError`` if a loader that makes its own batches cannot be accounted for.

    Formal guarantee. Accounting every step at rate 1 under replace-one is an upper bound:

    * A record is in at most one batch of each pass over the data, whatever the order. Replacing it changes only the
      sum of that batch, by at most 2C.
    * Under add-or-remove-one this does not hold: removing a record moves every later record one place up, so the sums
      of all later batches change, by up to 2C.
    * A rate below 1 would be wrong: every record takes part in every pass, and shuffling is not Poisson sampling.
    """
    if not isinstance(data_loader.dataset, data.IterableDataset) and not _takes_each_once(data_loader):
        raise ValueError(
            f"a {type(data_loader.sampler).__name__} may draw a record twice into one batch, where it would count "
            "twice, or choose by what records hold: use poisson_sampling=True, or make the loader with batch_size "
            "and shuffle only, and express a choice of records as a torch.utils.data.Subset"
        )
    if sample_rate < 1:
        raise ValueError(
            f"this DataLoader takes every record in every pass, in order or shuffled, which is not Poisson "
            f"sampling at rate {sample_rate:g} and spends more: use poisson_sampling=True, or sample_rate=1.0 with "
            "PrivacyEngine(relation=Relation.REPLACE_ONE)"
        )
    if relation is not Relation.REPLACE_ONE:
        raise ValueError(
            "without Poisson sampling, removing a record moves every later one to another place, so all later "
            "batches change: use poisson_sampling=True (with batch_size=len(dataset) to take all records at every "
            "step), or PrivacyEngine(relation=Relation.REPLACE_ONE)"
        )


def _takes_each_once(data_loader: data.DataLoader[Any]) -> bool:
    """Returns whether a pass is known to take each record at most once, whatever the contents of the records."""
    order: Any = data_loader.sampler
    if type(order) is data.RandomSampler:
        return not order.replacement and len(order) <= len(data_loader.dataset)  # type: ignore[arg-type]
    if type(order) is data.SubsetRandomSampler:
        return len({int(i) for i in order.indices}) == len(order.indices)
    return type(order) is data.SequentialSampler
