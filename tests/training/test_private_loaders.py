"""Private loaders are DataLoaders: scripts may look at them, but draw batches in one way only."""

import copy
import pickle

import pytest
import torch
from tests.support.opacus_runs import BATCH, N, private_run, records, train
from torch.utils.data import DataLoader, IterableDataset

from spectral_dp import PrivacyEngine, Relation
from spectral_dp.training.sampling import CountingLoader, PoissonLoader

DRAWN_OTHERWISE = r"hands out each of them once.*max_physical_batch_size, or import BatchMemoryManager from spectral_dp"


def as_it_is(**options):
    engine = PrivacyEngine(relation=Relation.REPLACE_ONE)
    return private_run(engine=engine, poisson_sampling=False, sample_rate=1.0, **options)


@pytest.mark.parametrize(("make", "kind"), [(private_run, PoissonLoader), (as_it_is, CountingLoader)])
def test_what_scripts_read(make, kind):
    data = records()
    *_, loader = make(dataset=data)
    given = DataLoader(data, batch_size=BATCH)
    assert isinstance(loader, DataLoader)
    assert type(loader) is kind
    assert len(loader) == len(given) == N // BATCH
    for name in ("dataset", "batch_size", "num_workers", "collate_fn", "pin_memory", "timeout", "drop_last"):
        assert getattr(loader, name) == getattr(given, name), name
    for name in ("worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"):
        assert getattr(loader, name) == getattr(given, name), name
    assert list(loader.sampler) == list(range(N)), "public: which records there are, and not which were drawn"
    assert loader.batch_sampler is not None


def test_opacus_own_loader_has_these_too():
    *_, theirs = private_run("opacus")
    *_, ours = private_run()
    assert isinstance(theirs, DataLoader)
    assert len(theirs) == len(ours)
    assert theirs.sample_rate == pytest.approx(ours.sample_rate)


@pytest.mark.parametrize("epoch_open", [False, True], ids=["before", "within an epoch"])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_batch_sampler_gives_nothing(epoch_open, workers):
    """What it would give was never handed out, so that the ledger does not know of it; or was, and is secret."""
    loader = PoissonLoader.from_data_loader(DataLoader(list(range(64)), batch_size=8, num_workers=workers))
    batches = iter(loader)
    if epoch_open:
        next(batches)
    with pytest.raises(RuntimeError, match=DRAWN_OTHERWISE):
        next(iter(loader.batch_sampler))
    with pytest.raises(RuntimeError, match=DRAWN_OTHERWISE):
        list(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler))
    if not workers:  # torch's iterator complains of itself when its workers were not started
        with pytest.raises(RuntimeError, match=DRAWN_OTHERWISE):
            list(DataLoader.__iter__(loader))
    assert sum(1 for _ in batches) == len(loader) - epoch_open, "the epoch is not disturbed"


def test_realised_sizes_do_not_show():
    """Neither in attributes, nor in how the loader prints, but for ``current``, which says that it is secret."""
    loader = PoissonLoader(records(), batch_size=BATCH)
    for _ in loader:
        shown = {k: v for k, v in vars(loader).items() if k != "current" and isinstance(v, int | float)}
        assert set(shown.values()) <= {BATCH, N, 0, 1}
        assert str(loader.current.size) not in repr(loader).split("0x")[0]
    assert loader.batch_size == BATCH


def test_opacus_memory_manager_says_what_to_write():
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    engine, model, optimizer, loader = private_run()
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)
    with manager as theirs, pytest.raises(RuntimeError, match=DRAWN_OTHERWISE):
        train(model, optimizer, theirs)
    engine, model, optimizer, loader = as_it_is()
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer)
    with manager as theirs, pytest.raises(AttributeError, match=r"spectral_dp\.utils\.batch_memory_manager"):
        train(model, optimizer, theirs)
    assert len(engine.accountant) == 0


def test_batches_of_a_loader_made_from_it_are_not_stepped():
    engine, model, optimizer, loader = as_it_is(rehearsal=False)
    other = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
    with pytest.raises(RuntimeError, match="iterate over that one"):
        train(model, optimizer, other)
    train(model, optimizer, loader)
    with pytest.raises(RuntimeError, match="stepped already"):
        train(model, optimizer, other)
    assert len(engine.accountant) == len(loader)


@pytest.mark.parametrize("make", [private_run, as_it_is])
def test_a_private_loader_can_be_made_private_again(make):
    """A script in a loop gives ``make_private`` the loader that it returned before."""
    engine, model, optimizer, loader = make()
    train(model, optimizer, loader)
    options = {} if make is private_run else {"poisson_sampling": False, "sample_rate": 1.0}
    _, optimizer, again = engine.make_private(
        module=model,
        optimizer=optimizer.original_optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    assert again is not loader
    train(model, optimizer, again)
    assert len(engine.accountant) == 2 * len(loader)


def test_streams_as_they_are():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(6.0))

    loader = CountingLoader(DataLoader(Stream(), batch_size=2))
    assert isinstance(loader, DataLoader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_a_loader_of_ones_own_makes_its_own_batches():
    class Doubling(DataLoader):
        factor = 2

        def __iter__(self):
            return (2 * batch for batch in super().__iter__())

    loader = CountingLoader(Doubling(list(range(4)), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]
    assert loader.factor == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_they_can_be_copied(duplicate):
    loader = PoissonLoader(list(range(64)), batch_size=8)
    list(loader)
    assert len(list(duplicate(loader))) == 8


def test_settings_of_the_ledger_cannot_be_changed():
    loader = PoissonLoader(records(), batch_size=BATCH)
    for name in ("batch_size", "sampler", "batch_sampler", "dataset"):
        with pytest.raises(ValueError, match="should not be set"):
            setattr(loader, name, None)
